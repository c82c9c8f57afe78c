"""The draft model's memory: rows are found again by their tokens, and the oldest active sessions keep theirs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.limits import IDLE_S
from draft_service.proposers.base import ProposeInput, SessionKey
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.model_base import Drafting
from engine.backends.toy_backend import ToyEngine, hashed_logits
from tandem.types import Proposal
from tests.draft.support import VOCAB, make_spec

LOGITS = hashed_logits(VOCAB)
K = 2


@dataclass
class Bench:
    """A proposer on a small engine, and its clock."""

    num_blocks: int = 3
    block_size: int = 4
    prefix_cache: bool = False
    max_context: int = 4096
    now_s: float = 0.0
    engine: ToyEngine = field(init=False)
    proposer: DraftModelProposer = field(init=False)

    def __post_init__(self) -> None:
        self.engine = ToyEngine(
            LOGITS,
            VOCAB,
            max_context=self.max_context,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            prefix_cache=self.prefix_cache,
        )
        self.proposer = DraftModelProposer(self.engine, drafting=Drafting(clock=lambda: self.now_s))

    def draft(self, *batch: tuple[int, Sequence[int]], k: int = K) -> list[int]:
        """One batch of (key, committed tokens) -> how many drafts each got, all of them what anybody would draft."""
        inputs = [ProposeInput(SessionKey(key), make_spec(tokens), tuple(tokens), k) for key, tokens in batch]
        proposals = self.proposer.propose(inputs)
        unbounded = DraftModelProposer(ToyEngine(LOGITS, VOCAB)).propose(inputs)
        for proposal, whole in zip(proposals, unbounded, strict=True):
            assert proposal is not None
            assert whole is not None
            assert proposal.draft_token_ids == whole.draft_token_ids[: len(proposal.draft_token_ids)]
        usage = self.engine.kv_usage()
        assert usage.free_blocks + usage.used_blocks + usage.cached_blocks == usage.total_blocks
        return [len(proposal.draft_token_ids) for proposal in proposals if proposal is not None]

    def rows(self, *keys: int) -> list[int]:
        return [self.proposer.kv.num_rows(SessionKey(key)) for key in keys]

    @property
    def num_shrunk(self) -> int:
        return self.proposer.kv_usage().shrunk_draft_tokens

    @property
    def num_fed(self) -> int:
        """Rows computed so far."""
        return sum(call.num_tokens for call in self.engine.calls)


def test_out_of_blocks_takes_the_rows_of_the_idle_session_that_drafted_longest_ago() -> None:
    bench = Bench()
    for key in (1, 2, 3, 1):
        assert bench.draft((key, [key, key])) == [2]
        bench.now_s += 1
    bench.now_s += IDLE_S
    assert bench.draft((9, [9, 9])) == [2]
    assert bench.rows(1, 2, 3, 9) == [3, 0, 3, 3]
    assert bench.num_shrunk == 0


def test_a_session_takes_no_rows_of_an_older_one_that_is_merely_with_the_target() -> None:
    bench = Bench()
    for key in (1, 2, 3):
        bench.draft((key, [key, key]))
    bench.now_s += IDLE_S - 0.1
    assert bench.draft((9, [9, 9])) == [0]
    assert bench.rows(1, 2, 3, 9) == [3, 3, 3, 0]
    assert bench.num_shrunk == 2
    assert bench.draft((3, [3] * 5)) == [0]  # the rows that it cannot use go to the others
    assert bench.rows(1, 2, 3) == [3, 3, 0]


def test_sessions_with_more_tokens_than_memory_do_not_compute_their_rows_anew_round_by_round() -> None:
    bench = Bench(num_blocks=12)
    tokens = {key: [key] * 11 for key in range(1, 7)}  # three blocks each, to four of them
    for round_number in range(8):
        for batch in ((1, 3, 5), (2, 4, 6)):
            before = bench.num_fed
            counts = bench.draft(*((key, tokens[key]) for key in batch))
            if round_number:
                assert counts == [K if key <= 4 else 0 for key in batch]
                assert bench.num_fed - before == sum(counts)  # a row a draft
            bench.now_s += 0.1


def test_a_session_that_cannot_draft_without_it_takes_memory_of_the_one_opened_last() -> None:
    bench = Bench()
    for key in (1, 3, 2):
        bench.draft((key, [key, key]))
    assert bench.draft((1, [1] * 5)) == [2]
    assert bench.rows(1, 2, 3) == [6, 3, 0]
    assert bench.num_shrunk == 0


def test_of_a_batch_the_session_opened_last_goes_without_wherever_it_stands() -> None:
    for batch in ([1, 2], [2, 1]):
        bench = Bench()
        counts = bench.draft(*((key, [key] * 7) for key in batch))
        assert dict(zip(batch, counts, strict=True)) == {1: 2, 2: 0}
        assert bench.rows(1, 2) == [8, 0]
        assert bench.num_shrunk == 2
        for key in batch:
            bench.proposer.forget(SessionKey(key))
            bench.proposer.forget(SessionKey(key))
        assert bench.engine.kv_usage().used_blocks == 0


def test_more_drafts_than_one_cost_nobody_in_the_batch_its_own() -> None:
    bench = Bench(num_blocks=3)
    # Each needs a block for its first draft; what is left is one block, for the older one's drafts.
    assert bench.draft((1, [1] * 4), (2, [2] * 4), k=6) == [5, 1]
    assert bench.num_shrunk == 1 + 5
    assert bench.draft((1, [1] * 4), (2, [2] * 4), (3, [3]), k=6) == [1, 1, 4]
    assert bench.num_shrunk == 6 + 5 + 5 + 2


def test_drafts_that_would_have_ended_anyway_are_not_counted_as_lost() -> None:
    bench = Bench(num_blocks=1)
    item = ProposeInput(SessionKey(1), make_spec([1] * 3), (1, 1, 1), 6)
    (whole,) = DraftModelProposer(ToyEngine(LOGITS, VOCAB)).propose([item])
    assert whole is not None
    ending = replace(item, spec=make_spec([1] * 3, eos=[whole.draft_token_ids[1]]))
    assert bench.proposer.propose([ending]) == [Proposal(whole.draft_token_ids[:2])]
    assert bench.num_shrunk == 0


def test_at_the_end_of_its_context_a_session_drafts_what_fits_and_then_holds_no_memory() -> None:
    for k in range(1, 10):
        bench = Bench(max_context=10, num_blocks=8)
        counts = [bench.draft((1, [1] * committed_len), k=k)[0] for committed_len in range(1, 14)]
        # The last draft has no row: K drafts need committed_len + K - 1.
        assert counts == [max(0, min(k, 10 - committed_len + 1)) for committed_len in range(1, 14)]
        assert bench.engine.kv_usage().used_blocks == 0
        assert bench.num_shrunk == 0


def test_a_session_longer_than_all_memory_drafts_nothing_and_takes_nothing_from_others() -> None:
    bench = Bench(num_blocks=3)
    bench.draft((2, [2] * 4))
    bench.now_s += IDLE_S
    assert bench.draft((1, [1] * 13)) == [0]
    assert bench.rows(1, 2) == [0, 5]
    assert bench.num_shrunk == 2
    assert bench.draft((1, [1] * 12)) == [1]  # the twelve rows that there are
    assert bench.num_shrunk == 3


def test_rows_that_another_session_has_made_are_found_by_their_tokens() -> None:
    prompt = list(range(14))
    for prefix_cache, num_fed in ((True, 2 + 1), (False, 14 + 1)):
        bench = Bench(num_blocks=32, prefix_cache=prefix_cache)
        bench.draft((1, prompt))
        before = bench.num_fed
        bench.draft((2, prompt))
        assert bench.num_fed - before == num_fed


def test_a_block_that_is_found_by_another_session_while_its_own_goes_back_into_it_is_counted_twice() -> None:
    for num_blocks, counts in ((3, [2, 0]), (4, [2, 2])):
        bench = Bench(num_blocks=num_blocks, prefix_cache=True)
        tokens = list(range(9))
        assert bench.draft((1, tokens)) == [2]  # two full blocks, and two rows of a third
        # Session 1 goes back into its second block; session 2 finds both, so each of them needs one of its own.
        assert bench.draft((1, [*tokens[:6], 20]), (2, tokens)) == counts


def test_rows_given_up_for_others_and_made_again_are_found_as_far_as_nobody_took_the_blocks() -> None:
    bench = Bench(num_blocks=8, prefix_cache=True)
    prompt = list(range(14))  # 4 blocks with the drafts, of which 3 are full
    bench.draft((2, prompt))
    bench.draft((1, [9] * 15))
    assert bench.draft((1, [9] * 17)) == [2]  # the fifth block is the younger session's last one
    assert bench.rows(2) == [0]
    bench.proposer.forget(SessionKey(1))
    before = bench.num_fed
    assert bench.draft((2, prompt)) == [2]
    assert bench.num_fed - before == 2 + 1
    assert bench.engine.kv_usage().hit_blocks == 3


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.integers(0, 1), min_size=1, max_size=24)), min_size=1, max_size=12
    ),
    st.sampled_from([1, 2, 5]),
)
@settings(max_examples=25, deadline=None)
def test_drafts_are_the_same_with_the_prefix_cache_and_without(
    histories: list[tuple[int, list[int]]], block_size: int
) -> None:
    cached = Bench(num_blocks=200, block_size=block_size, prefix_cache=True)
    plain = Bench(num_blocks=200, block_size=block_size)
    for key, tokens in histories:
        assert cached.draft((key, tokens)) == plain.draft((key, tokens)) == [K]
    assert cached.num_fed <= plain.num_fed
    for bench in (cached, plain):
        for key in range(5):
            bench.proposer.forget(SessionKey(key))
        assert bench.engine.kv_usage().used_blocks == 0
