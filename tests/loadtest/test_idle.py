"""What counts as being in use."""

from dataclasses import replace

from loadtest.idle import in_use
from tandem.client import ServerInfo
from tandem.types import Load, ModelInfo

IDLE = ServerInfo(
    target=ModelInfo(),
    target_load=Load(total_blocks=8),
    draft=ModelInfo(),
    draft_load=Load(),
    proposer="ngram",
    num_running_requests=0,
    is_target_connected=True,
    is_draft_connected=True,
)


def test_free_pools_without_sessions_are_idle() -> None:
    assert in_use(IDLE) == []
    assert in_use(replace(IDLE, draft=None, draft_load=None, is_draft_connected=False)) == []


def test_requests_sessions_and_blocks_are_in_use_on_either_service() -> None:
    assert in_use(replace(IDLE, num_running_requests=2)) == ["orchestrator: 2 running requests"]
    assert in_use(replace(IDLE, target_load=Load(used_blocks=3))) == [
        "target: 0 sessions, 0 waiting, 3 used blocks"
    ]
    assert in_use(replace(IDLE, draft_load=Load(running=1))) == ["draft: 1 sessions, 0 waiting, 0 used blocks"]
    assert in_use(replace(IDLE, target_load=Load(waiting=1))) != []


def test_a_service_that_cannot_be_asked_is_not_idle() -> None:
    assert in_use(replace(IDLE, is_target_connected=False)) != []
    assert in_use(replace(IDLE, is_draft_connected=False)) != []
