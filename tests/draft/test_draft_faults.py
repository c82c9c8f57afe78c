"""Faults seen in other systems, on the draft side: what each would look like here, and that it does not happen."""

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from draft_service.limits import DraftLimits
from draft_service.proposers.base import ProposeInput, SessionKey
from draft_service.proposers.draft_model import DraftModelProposer
from draft_service.proposers.model_base import Drafting
from engine.backends.base import HiddenCapture, SequenceInput
from engine.backends.toy_backend import ToyEngine, hashed_logits
from tandem.types import Proposal, SessionSpec
from tests.draft.clock import run_with_clock, settled, skip
from tests.draft.support import VOCAB, commit, coupled_spec, decide, make_spec
from tests.draft.wire import Peer, Running, close_item, open_item, proposal_of, propose_item, running

LOGITS = hashed_logits(VOCAB)
K = 4
KEY = SessionKey(1)


def bench(block_size: int = 16, num_blocks: int = 256, prefix_cache: bool = True) -> DraftModelProposer:
    return DraftModelProposer(
        ToyEngine(LOGITS, VOCAB, num_blocks=num_blocks, block_size=block_size, prefix_cache=prefix_cache)
    )


def engine_of(proposer: DraftModelProposer) -> ToyEngine:
    assert isinstance(proposer._engine, ToyEngine)
    return proposer._engine


def draft(
    proposer: DraftModelProposer, spec: SessionSpec, committed: Sequence[int], key: SessionKey = KEY, k: int = K
) -> Proposal:
    """One round; the blocks' accounting closes after it."""
    (proposal,) = proposer.propose([ProposeInput(key, spec, tuple(committed), k)])
    assert proposal is not None
    usage = proposer.kv_usage().blocks
    assert usage.free_blocks + usage.used_blocks + usage.cached_blocks == usage.total_blocks
    return proposal


def generate(
    proposer: DraftModelProposer, spec: SessionSpec, num_rounds: int, key: SessionKey = KEY
) -> tuple[list[int], list[int]]:
    """Rounds against a target with the same logits -> all tokens, and how many drafts each round accepted."""
    committed, accepted = list(spec.token_ids), []
    for _ in range(num_rounds):
        proposal = draft(proposer, spec, committed, key)
        decision = decide(LOGITS, spec, committed, proposal)
        commit(committed, proposal, decision)
        accepted.append(decision.num_accepted)
    proposer.forget(key)
    return committed, accepted


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_draft_rollback_arithmetic_rows_and_catch_up_are_all_but_the_last_token_at_every_block_offset(
    block_size: int,
) -> None:
    for prompt_len in range(1, 41):
        proposer = bench(block_size)
        prompt = [1 + (3 * index) % 29 for index in range(prompt_len)]
        spec, committed = make_spec(prompt), list(prompt)
        for num_accepted in (0, 4, 2, 4, 3, 1):
            drafts = draft(proposer, spec, committed).draft_token_ids
            assert len(drafts) == K
            wrong = (drafts[num_accepted] + 1) % VOCAB if num_accepted < K else 0
            committed += [*drafts[:num_accepted], wrong]
            pending = proposer.kv.roll_back(KEY, committed)
            rows = engine_of(proposer).token_ids(proposer.kv.sequence_id(KEY))
            assert rows + pending == committed
            assert len(pending) == (2 if num_accepted == K else 1)
            assert proposer.kv_usage().blocks.used_blocks == -(-len(rows) // block_size)


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("make", [make_spec, coupled_spec], ids=["greedy", "coupled"])
def test_full_accept_gap_in_draft_kv_every_draft_is_accepted_from_the_first_round_to_the_last(
    make: Callable[[Sequence[int]], SessionSpec], block_size: int
) -> None:
    for prompt_len in range(1, 41):
        _, accepted = generate(bench(block_size), make([1 + index % 7 for index in range(prompt_len)]), 6)
        assert accepted == [K] * 6


@pytest.mark.parametrize("block_size", [16, 64])
def test_allocated_versus_committed_length_drift_no_block_is_lost_over_a_hundred_sessions(block_size: int) -> None:
    proposer = bench(block_size)
    for index in range(101):
        generate(proposer, make_spec([index % 30] * (1 + index % 50)), 1 + index % 3, SessionKey(index))
        usage = proposer.kv_usage().blocks
        assert usage.used_blocks == 0
        assert usage.free_blocks + usage.cached_blocks == usage.total_blocks
    assert engine_of(proposer).sequence_ids == []


def test_prefix_caching_and_speculation_the_same_prompt_gets_the_same_drafts_and_acceptance() -> None:
    cached, plain = bench(), bench(prefix_cache=False)
    spec = make_spec([(5 * index) % 31 for index in range(64)])
    answers = []
    for index, proposer in enumerate((cached, cached, cached, plain)):
        answers.append(generate(proposer, spec, 6, SessionKey(3 * index)))
        generate(proposer, make_spec([index] * 37), 3, SessionKey(3 * index + 1))  # fragments the blocks
    assert answers == [answers[0]] * 4
    assert cached.kv_usage().blocks.hit_blocks == 2 * 3  # the last token has no row, so the 4th is not full
    assert plain.kv_usage().blocks.hit_blocks == 0


def test_stale_prefix_hash_a_prompt_whose_blocks_were_taken_is_computed_anew() -> None:
    proposer = bench(block_size=16, num_blocks=8)
    spec = make_spec([3] * 33)
    first = generate(proposer, spec, 3)
    for key in range(2, 6):
        generate(proposer, make_spec([key + 10] * 60), 8, SessionKey(key))
    assert proposer.kv_usage().blocks.evicted_blocks > 0
    num_hits = proposer.kv_usage().blocks.hit_blocks
    assert generate(proposer, spec, 3, SessionKey(9)) == first
    assert proposer.kv_usage().blocks.hit_blocks == num_hits


class HeldEngine(ToyEngine):
    """The forward number `held_at`, once it is set, waits until `go` is."""

    def __init__(self) -> None:
        super().__init__(LOGITS, VOCAB, block_size=4, prefix_cache=True)
        self.held_at: int | None = None
        self.num_forwards = 0
        self.held, self.go = threading.Event(), threading.Event()

    def advance(self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None) -> None:
        self._count()
        super().advance(inputs, capture)

    def forward_per_position_argmax(
        self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
    ) -> torch.Tensor:
        self._count()
        return super().forward_per_position_argmax(inputs, capture)

    def _count(self) -> None:
        self.num_forwards += 1
        if self.num_forwards == self.held_at:
            self.held.set()
            assert self.go.wait(20)


LEASE_S = 60.0
GONE, NEIGHBOUR = tuple([5] * 40), tuple([6] * 5)
STEP_TOKENS = 16
# At which forward: the neighbour's while the other is queued, the other's first chunk, its last one, its third draft.
POINTS = {"queued": 1, "in its first chunk": 5, "in its last chunk": 7, "drafting": 9, "answered": None}


@pytest.mark.parametrize("how", ["close", "close twice", "cancel", "vanish"])
@pytest.mark.parametrize("point", POINTS)
def test_abort_or_disconnect_at_any_point_leaks_no_memory_and_changes_no_neighbours_drafts(
    point: str, how: str
) -> None:
    toy = HeldEngine()
    proposer = DraftModelProposer(toy, drafting=Drafting(STEP_TOKENS))
    expected = [draft(bench(), make_spec(NEIGHBOUR), tokens) for tokens in (NEIGHBOUR, (*NEIGHBOUR, 9))]

    async def leave(server: Running, gone: Peer) -> None:
        if how == "cancel":
            gone.call.cancel()
        elif how.startswith("close"):
            await gone.send(*[close_item()] * (2 if how == "close twice" else 1))
        if how != "vanish":
            await settled(lambda: server.service.num_sessions == 1)

    async def act(server: Running, gone: Peer, neighbour: Peer) -> None:
        await gone.ask(open_item(make_spec(GONE)))
        await neighbour.ask(open_item(make_spec(NEIGHBOUR)))
        toy.held_at = POINTS[point]
        await neighbour.send(propose_item(NEIGHBOUR, 1, 5, num_draft_tokens=K))
        if point == "queued":
            await settled(toy.held.is_set)
        else:
            assert proposal_of(await neighbour.receive()) == expected[0]
        await gone.send(propose_item(GONE, 1, 40, num_draft_tokens=K))
        if point == "queued":
            await settled(lambda: server.service.batcher.num_waiting == 1)
        elif point == "answered":
            proposal_of(await gone.receive())
        else:
            await settled(toy.held.is_set)
        await leave(server, gone)
        toy.go.set()
        if point == "queued":
            assert proposal_of(await neighbour.receive()) == expected[0]
        if how == "vanish":
            await settled(lambda: server.service.batcher._worker.done())
            skip(LEASE_S - 1)
        again = propose_item((*NEIGHBOUR, 9), 2, 5, num_draft_tokens=K)
        assert proposal_of(await neighbour.ask(again)) == expected[1]
        if how == "vanish":
            skip(1)
        await settled(lambda: server.service.num_sessions == 1)
        await neighbour.ask(close_item())
        await settled(lambda: server.service.load.used_blocks == 0 and toy.sequence_ids == [])

    async def main() -> None:
        limits = DraftLimits(max_batch=STEP_TOKENS, session_lease_s=LEASE_S)
        async with running(proposer, limits) as server:
            peers = Peer(server.stub.Propose()), Peer(server.stub.Propose())
            await act(server, *peers)
            for peer in peers:
                peer.call.cancel()

    run_with_clock(main())
