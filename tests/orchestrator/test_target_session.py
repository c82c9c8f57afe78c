"""Verdicts arrive whatever happens to session and stream; what cannot be helped has a status of its own."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from orchestrator.replica_api import TARGET_API, ReplicaInfo
from orchestrator.sequence import BadVerdictError
from orchestrator.session_handle import Deadline, SessionHandle
from orchestrator.target_session import TargetPatience, TargetSession
from tandem import codec
from tandem.serving.errors import ServiceError
from tandem.target.v1 import target_pb2 as pb
from tandem.types import ErrorCode, ItemError, Load, ModelInfo, Proposal, SessionId
from tests.orchestrator.fake_link import FakeLink, OnePlace
from tests.orchestrator.fakes import make_sequence

DRAFTS = Proposal((5, 6))
OPENED = pb.VerifyResult(opened=pb.SessionOpened())
VERDICT = pb.VerifyResult(verdict=pb.Verdict(token_ids=[9]))
Target = FakeLink[pb.VerifyItem, pb.VerifyResult]


def error(code: ErrorCode, message: str = "because") -> pb.VerifyResult:
    return pb.VerifyResult(error=codec.error_to_proto(ItemError(code, message)))


def answering(
    *steps: pb.VerifyResult | None, opens: pb.VerifyResult = OPENED
) -> Callable[..., pb.VerifyResult | None]:
    """Opens are answered alike; steps one after the other, the last answer for ever."""
    left = list(steps)

    def answer(item: pb.VerifyItem) -> pb.VerifyResult | None:
        if item.WhichOneof("op") == "open":
            return _copy(opens)
        return _copy(left.pop(0) if len(left) > 1 else left[0])

    return answer


def _copy(result: pb.VerifyResult | None) -> pb.VerifyResult | None:
    return None if result is None else pb.VerifyResult.FromString(result.SerializeToString())


def session(link: Target, timeout_s: float | None = None, patience: TargetPatience | None = None) -> TargetSession:
    handle = SessionHandle(OnePlace(link), SessionId(1), Deadline(timeout_s), "trace")
    return TargetSession(handle, patience or TargetPatience(), ModelInfo())


def test_the_open_travels_with_the_first_round_and_is_not_waited_for() -> None:
    async def scenario() -> None:
        link: Target = FakeLink(TARGET_API, answering(VERDICT))
        sequence, target = make_sequence(), session(link, timeout_s=100)
        target.open(sequence)
        verdict = await target.verify(sequence, DRAFTS)
        assert verdict.token_ids == (9,)
        assert link.kinds == ["open", "verify"]
        opened, step = link.sent
        assert (opened.stamp.epoch, opened.stamp.round, step.stamp.epoch, step.stamp.round) == (1, 0, 1, 1)
        assert step.stamp.committed_len == 3
        assert step.stamp.prefix_hash == sequence.tokens.prefix_hash()
        assert 0 < step.deadline_ms <= 100_000
        assert step.traceparent == "trace"

    asyncio.run(scenario())


def test_a_target_says_of_no_round_that_it_took_longer_than_was_waited_for_it() -> None:
    async def scenario() -> None:
        verdict = pb.VerifyResult.FromString(VERDICT.SerializeToString())
        verdict.verdict.timing.queue_us = verdict.verdict.timing.compute_us = 2**64 - 1
        link: Target = FakeLink(TARGET_API, answering(verdict))
        sequence, target = make_sequence(), session(link)
        for _ in range(3):
            await target.verify(sequence, DRAFTS)
        stats = sequence.stats
        assert 0 <= stats.verify_timing.compute_us <= 1e6 * stats.verify_wait_s
        assert stats.to_proto().verify_timing.compute_us == stats.verify_timing.compute_us

    asyncio.run(scenario())


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_SESSION, ErrorCode.PREFIX_MISMATCH])
def test_a_session_the_target_does_not_have_is_opened_again_and_the_round_repeated(code: ErrorCode) -> None:
    async def scenario() -> None:
        link: Target = FakeLink(TARGET_API, answering(error(code), VERDICT))
        sequence, target = make_sequence(), session(link)
        target.open(sequence)
        assert (await target.verify(sequence, DRAFTS)).token_ids == (9,)
        assert link.kinds == ["open", "verify", "open", "verify"]
        assert [item.stamp.epoch for item in link.sent] == [1, 1, 2, 2]
        assert [item.stamp.round for item in link.sent] == [0, 1, 0, 1]
        assert link.sent[3].verify == link.sent[1].verify
        assert sequence.stats.num_reopens == 1
        target.close(sequence)
        assert link.kinds[-1] == "close"

    asyncio.run(scenario())


def test_a_lost_stream_is_waited_for_and_the_session_opened_on_the_new_one() -> None:
    async def scenario() -> None:
        link: Target = FakeLink(TARGET_API, answering(None, VERDICT))
        sequence, target = make_sequence(), session(link)
        target.open(sequence)
        task = asyncio.create_task(target.verify(sequence, DRAFTS))
        await asyncio.sleep(0)
        link.lose()
        link.come_back()
        assert (await task).token_ids == (9,)
        assert [item.stamp.epoch for item in link.sent] == [1, 1, 2, 2]

    asyncio.run(scenario())


def test_a_target_that_does_not_come_back_is_unavailable() -> None:
    async def scenario() -> ServiceError:
        link: Target = FakeLink(TARGET_API, answering(None))
        sequence, target = make_sequence(), session(link)
        task = asyncio.create_task(target.verify(sequence, DRAFTS))
        await asyncio.sleep(0)
        link.lose()
        with pytest.raises(ServiceError, match="down") as caught:
            await task
        target.close(sequence)
        return caught.value

    assert asyncio.run(scenario()).code is grpc.StatusCode.UNAVAILABLE


def test_a_session_that_is_lost_again_and_again_is_given_up() -> None:
    async def scenario() -> ServiceError:
        link: Target = FakeLink(TARGET_API, answering(error(ErrorCode.UNKNOWN_SESSION)))
        with pytest.raises(ServiceError) as caught:
            await session(link).verify(make_sequence(), DRAFTS)
        assert link.kinds == ["open", "verify"] * 8
        return caught.value

    assert asyncio.run(scenario()).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (ErrorCode.NO_CAPACITY, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ErrorCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT),
        (ErrorCode.UNIMPLEMENTED, grpc.StatusCode.UNIMPLEMENTED),
        (ErrorCode.DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
        (ErrorCode.INTERNAL, grpc.StatusCode.INTERNAL),
    ],
)
def test_a_refused_open_has_the_status_of_its_reason(code: ErrorCode, status: grpc.StatusCode) -> None:
    async def scenario() -> ServiceError:
        refused = answering(error(ErrorCode.UNKNOWN_SESSION), opens=error(code, "the pool has 4 blocks"))
        sequence, target = make_sequence(), session(FakeLink(TARGET_API, refused))
        target.open(sequence)
        with pytest.raises(ServiceError) as caught:
            await target.verify(sequence, DRAFTS)
        assert sequence.stats.num_reopens == 0
        return caught.value

    failure = asyncio.run(scenario())
    assert failure.code is status
    is_internal = status is grpc.StatusCode.INTERNAL
    assert ("target service at nowhere: the pool has 4 blocks" in str(failure)) is not is_internal


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_answer_that_has_begun_waits_for_room_and_a_new_request_does_not(has_begun: bool) -> None:
    async def scenario() -> None:
        full = error(ErrorCode.NO_CAPACITY)
        link: Target = FakeLink(TARGET_API, answering(full, full, VERDICT))
        sequence, target = make_sequence(), session(link)
        if not has_begun:
            with pytest.raises(ServiceError, match="because") as caught:
                await target.verify(sequence, DRAFTS)
            assert (caught.value.code, caught.value.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 1.0)
            return
        sequence.resume([7])
        assert (await target.verify(sequence, DRAFTS)).token_ids == (9,)
        assert link.kinds == ["open", "verify"] * 3

    asyncio.run(scenario())


def test_the_first_token_too_comes_from_what_the_request_was_begun_with() -> None:
    async def scenario() -> None:
        link: Target = FakeLink(TARGET_API, answering(VERDICT))
        link.info = ReplicaInfo(ModelInfo(numerics_fingerprint="other"), Load())
        sequence, target = make_sequence(), session(link)
        target.open(sequence)
        with pytest.raises(
            ServiceError, match=r"other numerics during the request: .*no fingerprint.* before"
        ) as caught:
            await target.verify(sequence, DRAFTS)
        assert caught.value.code is grpc.StatusCode.ABORTED
        assert link.sent == []

    asyncio.run(scenario())


def test_it_does_not_wait_for_room_for_ever() -> None:
    async def scenario() -> None:
        link: Target = FakeLink(TARGET_API, answering(error(ErrorCode.NO_CAPACITY)))
        sequence, target = make_sequence(), session(link, patience=TargetPatience(reconnect_s=0.1))
        sequence.resume([7])
        with pytest.raises(ServiceError) as caught:
            await target.verify(sequence, DRAFTS)
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(link.sent) > 2

    asyncio.run(scenario())


def test_drafts_the_target_refuses_are_dropped_and_the_round_becomes_plain_decoding() -> None:
    async def scenario() -> None:
        link: Target = FakeLink(TARGET_API, answering(error(ErrorCode.INVALID_ARGUMENT, "draft_probs"), VERDICT))
        sequence = make_sequence()
        assert (await session(link).verify(sequence, DRAFTS)).token_ids == (9,)
        steps = [item for item in link.sent if item.WhichOneof("op") == "verify"]
        assert [list(item.verify.proposal.draft_token_ids) for item in steps] == [[5, 6], []]
        assert [item.stamp.round for item in steps] == [1, 2]
        assert sequence.stats.num_fallback_rounds == 1

    asyncio.run(scenario())


def test_a_round_without_drafts_that_is_refused_fails_the_request() -> None:
    async def scenario() -> ServiceError:
        link: Target = FakeLink(TARGET_API, answering(error(ErrorCode.INVALID_ARGUMENT, "no")))
        with pytest.raises(ServiceError) as caught:
            await session(link).verify(make_sequence(), Proposal())
        return caught.value

    assert asyncio.run(scenario()).code is grpc.StatusCode.INVALID_ARGUMENT


def test_an_answer_without_an_outcome_is_an_internal_error() -> None:
    async def scenario() -> ServiceError:
        with pytest.raises(ServiceError) as caught:
            await session(FakeLink(TARGET_API, answering(pb.VerifyResult()))).verify(make_sequence(), DRAFTS)
        return caught.value

    failure = asyncio.run(scenario())
    assert (failure.code, str(failure)) == (grpc.StatusCode.INTERNAL, "internal error")


@pytest.mark.parametrize("fields", [{"token_ids": [9] * 4}, {"token_ids": [9], "logprobs": [{"rank": 1}] * 4}])
def test_a_verdict_of_more_than_was_asked_is_not_read(fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        link: Target = FakeLink(TARGET_API, answering(pb.VerifyResult(verdict=pb.Verdict(**fields))))
        with pytest.raises(BadVerdictError, match="where at most 3 can be"):
            await session(link).verify(make_sequence(), DRAFTS)

    asyncio.run(scenario())


def test_an_answer_that_does_not_come_is_asked_for_again_in_the_same_words() -> None:
    async def scenario() -> None:
        link: Target = FakeLink(TARGET_API, answering(None, VERDICT))
        verdict = await session(link, patience=TargetPatience(answer_s=0.01)).verify(make_sequence(), DRAFTS)
        assert verdict.token_ids == (9,)
        assert link.kinds == ["open", "verify", "verify"]
        assert link.sent[1] == link.sent[2]

    asyncio.run(scenario())


def test_a_deadline_ends_the_wait_and_nothing_is_asked_after_it() -> None:
    async def scenario() -> ServiceError:
        link: Target = FakeLink(TARGET_API, answering(None))
        sequence, target = make_sequence(), session(link, timeout_s=0.02)
        sequence.stats.draft_wait_s = 1.5
        waited = r"deadline has passed in round 1, after waiting [\d.]+ s for the target service at nowhere"
        with pytest.raises(ServiceError, match=waited) as caught:
            await target.verify(sequence, DRAFTS)
        assert str(caught.value).endswith(" and 1.50 s for drafts")
        asked = len(link.sent)
        with pytest.raises(ServiceError):
            await target.verify(sequence, DRAFTS)
        assert len(link.sent) == asked
        target.close(sequence)
        assert link.kinds[-1] == "close"
        assert not link.open_futures or all(future.done() for future in link.open_futures.values())
        return caught.value

    assert asyncio.run(scenario()).code is grpc.StatusCode.DEADLINE_EXCEEDED
