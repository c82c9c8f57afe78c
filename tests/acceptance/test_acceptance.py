"""Drafts are worth what the report says: a change that makes them worse is seen."""

import json

import pytest

from tests.acceptance.replay import Counts, StatesOf, replay
from tests.acceptance.report import NUM_CHECKED, NUM_DRAFT_TOKENS, REPORTS, WAYS, start, target_states
from tests.acceptance.workloads import TEMPERATURES, WORKLOADS, recorded

LEAST_SHARE = 0.95  # of the mean acceptance length on record

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def states_of() -> StatesOf:
    return target_states()


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", WAYS)
def test_the_mean_acceptance_length_is_that_of_the_report(
    name: str, workload: str, temperature: float, states_of: StatesOf
) -> None:
    on_record = json.loads((REPORTS / "acceptance.json").read_text())[name][f"{workload} at {temperature:g}"]
    answers = recorded(workload, temperature)[:NUM_CHECKED]
    counts = Counts().add_all(replay(start(name), answers, NUM_DRAFT_TOKENS, states_of))
    assert counts.mean_acceptance_length >= LEAST_SHARE * Counts(**on_record["checked"]).mean_acceptance_length
