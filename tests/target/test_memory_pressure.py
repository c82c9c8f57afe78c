"""A pool that is too small for all: drafts shrink, the newest is preempted and comes back, and no text changes."""

from collections import Counter

import numpy as np
import pytest
import torch

from engine.backends.base import SequenceId
from engine.backends.toy_backend import ToyEngine
from engine.sampling.policies import VerifyRows
from tandem.serving.items import Closed, Opened
from tandem.types import ErrorCode, ItemError, Proposal, SamplingParams, SessionSpec, Verdict, VerificationPolicy
from target_service.answers import StreamId
from target_service.limits import Limits
from target_service.step import StepItem, StepPlan
from target_service.verifier import Verifier
from tests.target.harness import GREEDY, LOGITS, VOCAB, Bench, plain_decode, spec, stamp, toy
from tests.target.play import Play, mixed_drafts, play, right_drafts

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
FEW_DRAFTS = Limits(max_draft_tokens=4)


def three(sampling: SamplingParams = GREEDY) -> dict[int, SessionSpec]:
    """Requests of 40 tokens each: 10 blocks of 4."""
    return {number: spec((number, 2, 3), 37, sampling) for number in (1, 2, 3)}


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "coupled"])
def test_with_room_for_two_and_a_half_of_three_requests_every_text_is_that_of_an_unlimited_pool(
    sampling: SamplingParams, prefix_cache: bool
) -> None:
    sessions = three(sampling)
    drafts_of = mixed_drafts(right_drafts(sessions), lambda length: length % 5)
    bench = Bench(toy(num_blocks=25, prefix_cache=prefix_cache), FEW_DRAFTS)
    played = play(bench, sessions, drafts_of)
    assert played.outputs == {number: plain_decode(session) for number, session in sessions.items()}
    load = bench.table.load()
    assert played.opened == [1, 2, 3]
    assert load.preemptions >= 1
    assert load.shrunk_draft_tokens >= 1


def test_drafts_take_what_is_left_and_preempt_nobody() -> None:
    bench = Bench(toy(num_blocks=70, block_size=1), Limits(max_draft_tokens=16))
    oldest, others = spec(max_tokens=27), [spec((number,) * 21, 1) for number in (4, 5)]
    bench.open(oldest, 1)
    for number, other in enumerate(others, 2):
        assert bench.open(other, number) == Opened()
    bench.settle()
    assert bench.used_blocks() == 2 + 2 * 20
    tokens, number = list(oldest.token_ids), 0
    while len(tokens) < 30:
        number += 1
        room = 30 - len(tokens)  # of the generation, and of the pool behind the rows of the others
        assert bench.round(tokens, number, (29,) * 16).num_draft_tokens == min(16, room - 1)
    assert tokens[3:] == plain_decode(oldest)
    assert bench.table.load().preemptions == 0


def test_the_newest_is_preempted_and_the_oldest_never_waits() -> None:
    sessions = three()
    bench = Bench(toy(num_blocks=14), FEW_DRAFTS)
    played = Play(bench)
    for number, session in sessions.items():
        played.begin(session, number)
    num_rounds = 0
    while 1 not in played.outputs:
        played.step()
        num_rounds += 1
        assert len(played.verdicts[1]) == num_rounds
    assert list(played.run()) == [1, 2, 3]
    assert bench.table.load().preemptions >= 1


@pytest.mark.parametrize("policy", [VerificationPolicy.REJECTION, VerificationPolicy.BLOCK])
def test_shrunk_drafts_leave_the_distribution_as_it_is(policy: VerificationPolicy) -> None:
    num_seeds, prompt = 500, [1, 2, 3]
    probs = torch.softmax(torch.from_numpy(LOGITS(prompt)).double(), dim=0).numpy()
    draft = int(np.argsort(probs)[-2])
    verifier = Verifier(toy(num_blocks=4, block_size=1))  # rows of the prompt but its last token, and of 1 draft
    counts: Counter[int] = Counter()
    for seed in range(num_seeds):
        session = spec(prompt, sampling=SamplingParams(seed=seed), verification_policy=policy)
        request = VerifyRows(session, prompt, Proposal((draft, 7, 7, 7)))
        (outcome,) = verifier.step(StepPlan((), (StepItem(None, 0, prompt, 7, request),))).outcomes
        assert isinstance(outcome.decided, Verdict)
        assert outcome.decided.num_draft_tokens == 1
        counts[outcome.decided.token_ids[0]] += 1
        assert outcome.sequence_id is not None
        verifier.step(StepPlan((outcome.sequence_id,), ()))
    # Every bound is 4.5 standard deviations of a binomial count.
    observed = np.array([counts[token] for token in range(VOCAB)])
    assert (np.abs(observed - probs * num_seeds) <= 4.5 * np.sqrt(probs * (1 - probs) * num_seeds) + 1).all()


def pressed() -> tuple[Bench, list[int]]:
    """Sessions 1 and 2 in a pool for one and a half; 2 has just been preempted -> its tokens."""
    bench = Bench(toy(num_blocks=7), Limits(max_draft_tokens=0))
    first, second = spec((1,) * 9, 15), spec((2,) * 9, 15)
    tokens = {1: list(first.token_ids), 2: list(second.token_ids)}
    assert bench.open(first, 1) == Opened()
    bench.round(tokens[1], 1, session=1)
    assert bench.open(second, 2) == Opened()
    bench.round(tokens[2], 1, session=2)
    number = 1
    while bench.table.load().preemptions == 0:
        number += 1
        bench.round(tokens[1], number, session=1)
    return bench, tokens[2]


def with_round(bench: Bench, tokens: list[int]) -> None:
    """The preempted session asks its second round, which waits."""
    assert bench.submit(stamp(tokens, 2, 2)) is None
    assert bench.settle() == []


def test_a_preempted_session_goes_on_by_itself_when_there_is_room() -> None:
    bench, tokens = pressed()
    with_round(bench, tokens)
    assert (bench.table.load().running, bench.table.load().waiting) == (1, 2)
    bench.close(stamp((1,) * 9, 0, 1))
    closed, answer = bench.settle()
    assert closed.outcome == Closed()
    assert isinstance(answer.outcome, Verdict)
    assert list(answer.outcome.token_ids) == plain_decode(spec((2,) * 9, 15))[1:2]


def test_repeats_are_answered_with_the_recorded_verdict_while_a_session_is_preempted() -> None:
    bench, tokens = pressed()
    (recorded,) = (a.outcome for _, a in bench.answers if (a.stamp.session_id, a.stamp.round) == (2, 1))
    num_calls = len(bench.engine.calls)
    assert bench.submit(stamp(tokens[:9], 1, 2), (5, 5)) == recorded
    assert bench.settle() == []
    assert len(bench.engine.calls) == num_calls
    assert bench.open(spec((2,) * 9, 15), 2) == Opened()


def test_the_deadline_of_a_preempted_sessions_round_is_kept() -> None:
    bench, tokens = pressed()
    with_round(bench, tokens)
    assert bench.submit(stamp(tokens, 3, 2), deadline_s=4.0) is None
    assert bench.table.next_deadline_s() == 4.0
    bench.table.expire(4.0)
    error = bench.answers[-1][1].outcome
    assert isinstance(error, ItemError)
    assert error.code is ErrorCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("change", ["close", "reopen", "stream ends"])
def test_a_preempted_session_that_ends_leaves_nothing_behind(change: str) -> None:
    bench, tokens = pressed()
    with_round(bench, tokens)
    if change == "close":
        assert bench.close(stamp(tokens, 0, 2)) == Closed()
    elif change == "reopen":
        again = spec((2,) * 9, 15, token_ids=tuple(tokens), prompt_len=9)
        assert bench.open(again, 2, epoch=2) is None
        assert len(bench.table) == 2
        assert bench.close(stamp(tokens, 0, 2, epoch=2)) == Closed()
    else:
        bench.table.end_stream(StreamId(1))
    bench.settle()
    assert len(bench.table) == (change != "stream ends")
    bench.table.end_stream(StreamId(1))
    bench.settle()
    load = bench.table.load()
    assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)
    assert bench.engine.sequence_ids == []


def full() -> tuple[Bench, dict[int, list[int]]]:
    """Three sessions that fill the pool with their rows -> their tokens."""
    bench = Bench(toy(num_blocks=14, block_size=1), Limits(max_draft_tokens=0))
    tokens = {number: [number, 2, 3] for number in (1, 2, 3)}
    for number in tokens:
        assert bench.open(spec(tokens[number], 11), number) == Opened()
    for number in tokens:
        bench.round(tokens[number], 1, session=number)
    while bench.used_blocks() < 14:
        bench.round(tokens[1], len(tokens[1]), session=1)
    return bench, tokens


def test_rounds_that_arrive_during_a_step_for_which_there_was_no_memory_are_all_part_of_the_next() -> None:
    bench, tokens = full()
    bench.submit(stamp(tokens[3], 2, 3))
    plan = bench.table.plan_step(0.0)
    assert plan is not None
    bench.submit(stamp(tokens[1], 99, 1))
    bench.submit(stamp(tokens[2], 2, 2))
    bench.compute(plan)
    assert bench.step() == 3
    assert bench.table.load().preemptions == 1


def test_a_round_for_which_there_is_no_memory_is_not_tried_again_before_something_changes() -> None:
    bench, tokens = full()
    bench.submit(stamp(tokens[3], 2, 3))
    num_calls = len(bench.engine.calls)
    assert [bench.step() for _ in range(4)] == [1, 1, 0, 0]  # with all others, then alone
    assert len(bench.engine.calls) == num_calls
    bench.close(stamp(tokens[2], 0, 2))
    closed, answer = bench.settle()
    assert closed.outcome == Closed()
    assert isinstance(answer.outcome, Verdict)
    assert bench.table.load().preemptions == 0


class Faulty(ToyEngine):
    """Raises once in the forward before which somebody has been preempted."""

    num_released = 0

    def release(self, sequence_id: SequenceId) -> None:
        super().release(sequence_id)
        self.num_released += 1

    def _delay(self, num_tokens: int) -> None:
        if self.num_released == 1:
            self.num_released = 2
            raise RuntimeError("a fault")


def test_a_step_that_raises_after_it_preempted_somebody_costs_only_its_own_sessions() -> None:
    bench = Bench(Faulty(LOGITS, VOCAB, num_blocks=7, block_size=4), Limits(max_draft_tokens=0))
    sessions = {1: spec((1,) * 9, 15), 2: spec((2,) * 9, 15)}
    tokens = {number: list(session.token_ids) for number, session in sessions.items()}
    for number, session in sessions.items():
        bench.open(session, number)
        bench.round(tokens[number], 1, session=number)
    error: object = None
    while not isinstance(error, ItemError):
        bench.submit(stamp(tokens[1], len(tokens[1]), 1))
        (answer,) = bench.settle()
        error = answer.outcome
        tokens[1] += error.token_ids if isinstance(error, Verdict) else ()
    assert str(error) == "INTERNAL: internal error"
    assert (bench.table.load().preemptions, len(bench.table)) == (1, 1)
    bench.round(tokens[2], 2, session=2)
    assert tokens[2][9:] == plain_decode(sessions[2])[:2]
