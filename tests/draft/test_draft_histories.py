"""The draft service under memory pressure, through random histories; the short form runs by default."""

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.draft.checked_service import AMPLE, Pressure
from tests.draft.machine import DraftHistories

PRESSURES = (
    Pressure(AMPLE, block_size=4, prefix_cache=True),
    Pressure(AMPLE, block_size=1, prefix_cache=False, max_context=18),
    Pressure(2, block_size=4, prefix_cache=True),
    Pressure(7, block_size=4, prefix_cache=True),
    Pressure(10, block_size=2, prefix_cache=True, max_context=24),
    Pressure(7, block_size=4, prefix_cache=False),
    Pressure(24, block_size=1, prefix_cache=True),
    Pressure(30, block_size=1, prefix_cache=False),
)
NUM_HISTORIES = 8  # of a shard under one pressure
SHARDS = [0, *(pytest.param(shard, marks=pytest.mark.slow) for shard in range(1, 32))]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("pressure", PRESSURES, ids=str)
def test_sessions_rows_drafts_and_blocks_are_what_a_model_without_paging_says(
    pressure: Pressure, shard: int
) -> None:
    histories = type("Histories", (DraftHistories,), {"pressure": pressure})
    run_state_machine_as_test(
        seed(shard * len(PRESSURES) + PRESSURES.index(pressure))(histories),
        settings=settings(
            max_examples=NUM_HISTORIES,
            stateful_step_count=50,
            deadline=None,
            database=None,
            phases=(Phase.generate,),  # add Phase.shrink to look into a failure: it takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
