"""What counts as being in use."""

from dataclasses import replace

import pytest

from loadtest.idle import in_use
from tandem.client import ReplicaInfo, ServerInfo
from tandem.types import Load, ModelInfo

TARGET = ReplicaInfo("target", "h:1", True, ModelInfo(), Load(total_blocks=8))
DRAFT = ReplicaInfo("draft", "h:2", True, ModelInfo(), Load(), "ngram")
IDLE = ServerInfo(0, (TARGET, DRAFT))


def test_free_pools_without_sessions_are_idle() -> None:
    assert in_use(IDLE) == []
    assert in_use(replace(IDLE, replicas=(TARGET,))) == []


def test_requests_sessions_and_blocks_are_in_use_on_any_replica() -> None:
    assert in_use(replace(IDLE, num_running_requests=2)) == ["orchestrator: 2 running requests"]
    used = replace(TARGET, address="h:3", load=Load(used_blocks=3))
    assert in_use(ServerInfo(0, (TARGET, used, DRAFT))) == ["target at h:3: 0 sessions, 0 waiting, 3 used blocks"]
    running = replace(DRAFT, load=Load(running=1))
    assert in_use(ServerInfo(0, (TARGET, running))) == ["draft at h:2: 1 sessions, 0 waiting, 0 used blocks"]
    assert in_use(ServerInfo(0, (replace(TARGET, load=Load(waiting=1)),))) != []


@pytest.mark.parametrize("replica", [TARGET, DRAFT])
def test_a_replica_that_cannot_be_asked_is_not_idle(replica: ReplicaInfo) -> None:
    assert in_use(ServerInfo(0, (replace(replica, is_connected=False),))) != []
