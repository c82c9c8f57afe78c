"""A call whose time is up while its target is away: who was waited for is told, and in time to be heard."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest

from orchestrator.pools import TargetPool
from orchestrator.replica_api import TARGET_API
from orchestrator.replica_link import LinkLostError
from orchestrator.server import OrchestratorServicer, OrchestratorSettings
from orchestrator.session_handle import Deadline
from orchestrator.target_session import TargetPatience
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.serving.errors import ServiceError
from tandem.target.v1 import target_pb2
from tandem.vocabulary import Vocabulary
from tests.orchestrator.fake_link import FakeLink, OnePlace

PATIENCE_S = 60.0


class LostTargets(OnePlace[target_pb2.VerifyItem, target_pb2.VerifyResult]):
    """A target that is away; `waits` are the seconds it was waited for, of which it takes none or all."""

    def __init__(self, takes_time: bool) -> None:
        super().__init__(FakeLink(TARGET_API, lambda _: None))
        self.takes_time = takes_time
        self.waits: list[float] = []

    async def wait_for(self, timeout_s: float, fits: Callable[[Any], bool] = lambda _: True) -> Any:
        self.waits.append(timeout_s)
        if self.takes_time:
            await asyncio.sleep(timeout_s)
        raise LinkLostError("target service at nowhere is not reachable: Connection refused")


class Call:
    """As much of a call's context as is looked at before anything is scheduled."""

    def __init__(self, time_remaining_s: float | None) -> None:
        self._time_remaining_s = time_remaining_s

    def time_remaining(self) -> float | None:
        return self._time_remaining_s

    def invocation_metadata(self) -> None:
        """Nothing was sent."""


def failure(targets: LostTargets, time_remaining_s: float | None) -> ServiceError:
    """What a request ends with."""
    settings = OrchestratorSettings(target_patience=TargetPatience(reconnect_s=PATIENCE_S))
    servicer = OrchestratorServicer(Vocabulary.toy(8), cast("TargetPool", targets), None, settings)

    async def scenario() -> ServiceError:
        call: Any = Call(time_remaining_s)
        with pytest.raises(ServiceError) as caught:
            async for _ in servicer.Generate(pb.GenerateRequest(text="x"), call):
                pass
        return caught.value

    return asyncio.run(scenario())


def test_a_deadline_that_passes_while_the_target_is_away_names_it_and_why_it_is() -> None:
    error = failure(LostTargets(takes_time=True), 0.02)
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert str(error) == (
        "the request's deadline has passed: target service at nowhere is not reachable: Connection refused"
    )


def test_a_target_that_stays_away_longer_than_is_waited_for_is_unavailable() -> None:
    error = failure(LostTargets(takes_time=False), 100.0)
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert str(error) == "target service at nowhere is not reachable: Connection refused"


@pytest.mark.parametrize(
    ("time_remaining_s", "longest_wait_s"), [(0.1, 0.095), (2.0, 1.95), (100.0, PATIENCE_S), (None, PATIENCE_S)]
)
def test_the_last_of_a_calls_time_is_left_to_tell_why_it_was_not_enough(
    time_remaining_s: float | None, longest_wait_s: float
) -> None:
    targets = LostTargets(takes_time=False)
    failure(targets, time_remaining_s)
    (wait_s,) = targets.waits
    assert 0 < wait_s <= longest_wait_s


def test_a_call_that_comes_too_late_is_not_waited_with() -> None:
    targets = LostTargets(takes_time=False)
    assert "had passed on arrival" in str(failure(targets, -0.5))
    assert targets.waits == []


def test_a_deadline_is_over_once_no_time_is_left() -> None:
    now = 10.0
    deadline = Deadline(2.0, lambda: now)
    assert (deadline.is_over, deadline.remaining_s(60.0), deadline.remaining_s(1.0)) == (False, 2.0, 1.0)
    now = 12.0
    assert (deadline.is_over, deadline.remaining_s(60.0)) == (True, 0.0)
