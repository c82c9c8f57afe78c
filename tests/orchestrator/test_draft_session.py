"""Whatever the draft service does, a round gets a proposal: at worst an empty one, counted as a fallback."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from orchestrator.draft_length import AcceptanceKnown, DraftLength
from orchestrator.draft_session import DraftSession
from orchestrator.replica_api import DRAFT_API
from orchestrator.sequence import Sequence
from orchestrator.session_handle import Deadline, SessionHandle
from tandem import codec
from tandem.common.v1 import common_pb2
from tandem.draft.v1 import draft_pb2 as pb
from tandem.types import ErrorCode, ItemError, Load, Proposal, SessionId, Verdict
from tests.orchestrator.fake_link import FakeLink, OnePlace
from tests.orchestrator.fakes import make_sequence

Draft = FakeLink[pb.ProposeItem, pb.ProposeResult]


def proposal(*token_ids: int) -> pb.ProposeResult:
    return pb.ProposeResult(proposal=common_pb2.Proposal(draft_token_ids=token_ids))


def error(code: ErrorCode) -> pb.ProposeResult:
    return pb.ProposeResult(error=codec.error_to_proto(ItemError(code, "because")))


class Scenario:
    """A draft session on a fake link, and a sequence that grows by one token a round."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.step_answer: Callable[[], pb.ProposeResult | None] = lambda: proposal(5, 6)
        self.open_answer: Callable[[], pb.ProposeResult | None] = lambda: pb.ProposeResult(
            opened=pb.SessionOpened()
        )
        self.link: Draft = FakeLink(DRAFT_API, self._answer)
        handle = SessionHandle(OnePlace(self.link), SessionId(1), Deadline(None))
        self.session = DraftSession(handle, vocab_size=64, timeout_s=timeout_s)
        self.sequence: Sequence = make_sequence(max_tokens=400)

    def _answer(self, item: pb.ProposeItem) -> pb.ProposeResult | None:
        return self.open_answer() if item.WhichOneof("op") == "open" else self.step_answer()

    async def round(self) -> tuple[int, ...]:
        """Propose, and commit one token -> the drafts."""
        drafts = await self.session.propose(self.sequence)
        self.sequence.commit(Proposal(), Verdict(0, 0, (9,)))
        return drafts.draft_token_ids

    @property
    def num_fallbacks(self) -> int:
        return self.sequence.stats.num_fallback_rounds


def play(act: Callable[[Scenario], Awaitable[None]], timeout_s: float = 20.0) -> None:
    async def main() -> None:
        await act(Scenario(timeout_s))

    asyncio.run(main())


def test_the_first_proposal_comes_with_the_open_and_later_ones_bring_the_tail() -> None:
    async def act(scenario: Scenario) -> None:
        assert [await scenario.round() for _ in range(3)] == [(5, 6)] * 3
        assert scenario.link.kinds == ["open", "propose", "propose", "propose"]
        first, second, third = (item.propose for item in scenario.link.sent[1:])
        assert (first.tail_start, list(first.committed_token_ids), first.num_draft_tokens) == (3, [], 4)
        assert (second.tail_start, list(second.committed_token_ids)) == (3, [9])
        assert (third.tail_start, list(third.committed_token_ids)) == (4, [9])
        assert scenario.link.sent[3].stamp.committed_len == 5
        assert scenario.num_fallbacks == 0

    play(act)


def test_a_service_says_of_no_round_that_it_took_longer_than_was_waited_for_it() -> None:
    async def act(scenario: Scenario) -> None:
        answer = proposal(5)
        answer.timing.queue_us = answer.timing.compute_us = 2**64 - 1
        scenario.step_answer = lambda: answer
        for _ in range(3):
            assert await scenario.round() == (5,)
        stats = scenario.sequence.stats
        assert 0 <= stats.draft_timing.queue_us == stats.draft_timing.compute_us <= 1e6 * stats.draft_wait_s
        assert stats.to_proto().draft_timing.queue_us == stats.draft_timing.queue_us

    play(act)


def test_no_draft_is_asked_for_where_none_can_be_used() -> None:
    async def act(scenario: Scenario) -> None:
        scenario.sequence = make_sequence(max_tokens=1)
        assert await scenario.session.propose(scenario.sequence) == Proposal()
        assert scenario.link.sent == []
        assert scenario.num_fallbacks == 0

    play(act)


def test_an_empty_answer_is_no_fallback() -> None:
    async def act(scenario: Scenario) -> None:
        scenario.step_answer = proposal
        assert await scenario.round() == ()
        assert scenario.num_fallbacks == 0

    play(act)


def test_after_a_late_answer_rounds_do_not_wait_until_it_has_come() -> None:
    async def act(scenario: Scenario) -> None:
        scenario.step_answer = lambda: None
        assert await scenario.round() == ()
        late = scenario.link.sent[-1]
        assert [await scenario.round() for _ in range(3)] == [()] * 3
        assert scenario.link.sent[-1] is late
        assert scenario.num_fallbacks == 4
        key = (late.stamp.session_id, late.stamp.epoch, late.stamp.round)
        scenario.link.open_futures[key].set_result(proposal(1))
        scenario.step_answer = lambda: proposal(7)
        assert await scenario.round() == (7,)
        tail = scenario.link.sent[-1].propose
        assert (tail.tail_start, list(tail.committed_token_ids)) == (3, [9] * 4)
        assert scenario.link.kinds.count("open") == 1

    play(act, timeout_s=0.02)


def test_an_answer_that_never_comes_makes_the_session_open_again() -> None:
    async def act(scenario: Scenario) -> None:
        scenario.step_answer = lambda: None
        assert await scenario.round() == ()
        scenario.step_answer = lambda: proposal(7)
        while await scenario.round() == ():
            await asyncio.sleep(0.001)
        assert scenario.link.kinds.count("open") == 2
        assert scenario.sequence.stats.num_reopens == 1

    play(act, timeout_s=0.01)


def test_a_lost_stream_costs_drafts_until_it_is_back_and_the_session_opens_in_the_background() -> None:
    async def act(scenario: Scenario) -> None:
        assert await scenario.round() == (5, 6)
        scenario.link.lose()
        assert [await scenario.round() for _ in range(50)] == [()] * 50
        scenario.link.come_back()
        scenario.open_answer = lambda: None
        assert [await scenario.round() for _ in range(3)] == [()] * 3  # the open is not waited for
        opened = scenario.link.sent[-1]
        assert opened.WhichOneof("op") == "open"
        assert opened.stamp.epoch == 2
        assert len(opened.open.token_ids) == 3 + 51
        key = (opened.stamp.session_id, opened.stamp.epoch, 0)
        scenario.link.open_futures[key].set_result(pb.ProposeResult(opened=pb.SessionOpened()))
        assert await scenario.round() == (5, 6)
        assert scenario.link.sent[-1].propose.tail_start == 3 + 51
        assert list(scenario.link.sent[-1].propose.committed_token_ids) == [9] * 3
        assert scenario.num_fallbacks == 53

    play(act)


def test_a_session_whose_second_open_is_never_answered_is_opened_once_more() -> None:
    async def act(scenario: Scenario) -> None:
        assert await scenario.round() == (5, 6)
        scenario.link.lose()
        scenario.link.come_back()
        scenario.open_answer = lambda: None
        assert await scenario.round() == ()
        scenario.open_answer = lambda: pb.ProposeResult(opened=pb.SessionOpened())
        while await scenario.round() == ():
            await asyncio.sleep(0.001)
        assert [item.stamp.epoch for item in scenario.link.sent if item.WhichOneof("op") == "open"] == [1, 2, 3]

    play(act, timeout_s=0.01)


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_SESSION, ErrorCode.PREFIX_MISMATCH, ErrorCode.INTERNAL])
def test_a_session_the_draft_lost_is_opened_again(code: ErrorCode) -> None:
    async def act(scenario: Scenario) -> None:
        assert await scenario.round() == (5, 6)
        scenario.step_answer = lambda: error(code)
        assert await scenario.round() == ()
        scenario.step_answer = lambda: proposal(7)
        assert await scenario.round() == ()
        assert await scenario.round() == (7,)
        assert [item.stamp.epoch for item in scenario.link.sent] == [1, 1, 1, 2, 2]
        assert scenario.num_fallbacks == 2

    play(act)


def test_a_draft_that_keeps_failing_is_asked_less_and_less() -> None:
    async def act(scenario: Scenario) -> None:
        scenario.step_answer = lambda: error(ErrorCode.INTERNAL)
        for _ in range(300):
            assert await scenario.round() == ()
        assert scenario.link.kinds.count("propose") < 12
        assert scenario.num_fallbacks == 300

    play(act)


@pytest.mark.parametrize("code", [ErrorCode.INVALID_ARGUMENT, ErrorCode.UNIMPLEMENTED])
def test_a_draft_that_refuses_the_session_is_not_asked_again(code: ErrorCode) -> None:
    async def act(scenario: Scenario) -> None:
        scenario.open_answer = lambda: error(code)
        scenario.step_answer = lambda: error(ErrorCode.UNKNOWN_SESSION)
        assert [await scenario.round() for _ in range(20)] == [()] * 20
        assert scenario.link.kinds == ["open", "propose"]
        assert scenario.num_fallbacks == 20

    play(act)


@pytest.mark.parametrize(
    "answer",
    [
        proposal(1, 2, 3, 4, 5),  # more than wanted
        proposal(64),  # outside the vocabulary
        pb.ProposeResult(),
        pb.ProposeResult(opened=pb.SessionOpened()),
        pb.ProposeResult(proposal=common_pb2.Proposal(draft_token_ids=[1], parents=[0])),
        pb.ProposeResult(
            proposal=common_pb2.Proposal(
                draft_token_ids=[1], draft_probs=[common_pb2.DraftProbs(token_ids_u32=b"123", probs_f32=b"1")]
            )
        ),
    ],
)
def test_garbage_never_reaches_the_target(answer: pb.ProposeResult) -> None:
    async def act(scenario: Scenario) -> None:
        scenario.step_answer = lambda: answer
        assert await scenario.round() == ()
        assert scenario.num_fallbacks == 1

    play(act)


def test_of_too_many_drafts_nothing_is_read() -> None:
    """What else is wrong with the message is not found, for that would end the asking."""
    too_many = proposal(*[1] * 5)
    too_many.proposal.draft_probs.extend([common_pb2.DraftProbs(probs_f32=b"1")] * 5)

    async def act(scenario: Scenario) -> None:
        scenario.step_answer = lambda: too_many
        assert await scenario.round() == ()
        scenario.step_answer = lambda: proposal(7)
        assert (7,) in [await scenario.round() for _ in range(4)]

    play(act)


def test_no_session_is_opened_on_a_draft_that_is_shutting_down() -> None:
    async def act(scenario: Scenario) -> None:
        scenario.link.load = Load(draining=True)
        assert await scenario.round() == ()
        assert scenario.link.sent == []

    play(act)


def test_a_session_for_which_nothing_is_drafted_leaves_a_draft_that_is_shutting_down() -> None:
    async def act(scenario: Scenario) -> None:
        other: Draft = FakeLink(DRAFT_API, lambda _: None)
        handle = SessionHandle(OnePlace(scenario.link, other), SessionId(1), Deadline(None))
        load = Load(step_sessions=1.0)
        length = DraftLength(AcceptanceKnown(), scenario.sequence.stats, lambda: load)
        scenario.session = DraftSession(handle, vocab_size=64, length=length)
        assert await scenario.round() == (5, 6)
        load = Load(step_sessions=64.0, step_overhead_rows=10.0)
        assert await scenario.round() == ()
        assert scenario.link.kinds == ["open", "propose"]
        scenario.link.load = Load(draining=True)
        assert await scenario.round() == ()
        assert scenario.link.kinds == ["open", "propose", "close"]
        assert scenario.num_fallbacks == 0

    play(act)


def test_closing_frees_the_session_once_it_was_opened_and_forgets_late_answers() -> None:
    async def act(scenario: Scenario) -> None:
        scenario.session.close(scenario.sequence)
        assert scenario.link.sent == []
        scenario.step_answer = lambda: None
        assert await scenario.round() == ()
        (late,) = (future for future in scenario.link.open_futures.values() if not future.done())
        scenario.session.close(scenario.sequence)
        assert scenario.link.kinds == ["open", "propose", "close"]
        assert late.cancelled()

    play(act, timeout_s=0.01)
