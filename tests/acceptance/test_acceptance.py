"""Drafts are worth what the report says: a change that makes them worse is seen."""

import json

import pytest

from tests.acceptance.replay import Counts, StatesOf, replay
from tests.acceptance.report import NUM_CHECKED, NUM_DRAFT_TOKENS, REPORTS, WAYS, start, target_states
from tests.acceptance.workloads import TEMPERATURES, WORKLOADS, recorded

LEAST_SHARE = 0.95  # of the mean acceptance length on record


def test_rounds_without_drafts_count_in_one_of_the_two_mean_lengths() -> None:
    counts = Counts()
    for num_drafts, num_accepted in ((0, 0), (4, 2), (1, 1), (3, 0)):
        counts.add(num_drafts, num_accepted)
    assert counts.mean_acceptance_length == 1 + 3 / 4
    assert counts.mean_length_with_drafts == 1 + 3 / 3
    assert counts.rates == [2 / 3, 1 / 2, 0.0, 0.0]
    assert Counts(num_rounds=2).mean_length_with_drafts == 1.0


@pytest.fixture(scope="module")
def states_of() -> StatesOf:
    return target_states()


@pytest.mark.model
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
