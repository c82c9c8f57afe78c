"""Sessions, epochs, rounds, memory and steps in any order: two thousand histories against plain decoding."""

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.target.history import Histories
from tests.target.history_model import seen

NUM_HISTORIES = 100
SHARDS = [0, *(pytest.param(shard, marks=pytest.mark.slow) for shard in range(1, 20))]


@pytest.mark.parametrize("shard", SHARDS)
def test_histories(shard: int) -> None:
    seen.clear()
    run_state_machine_as_test(
        seed(shard)(Histories),
        settings=settings(
            max_examples=NUM_HISTORIES,
            stateful_step_count=40,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    kinds = {"preempted", "shrunk", "deferred", "waited", "refused", "evicted", "reopened", "repeated"}
    kinds |= {"repeated for another base", "displaced"}
    assert kinds == {kind for kind, count in seen.items() if count > 0}
