"""The report on block verification: its figures are exact, recomputable, and never against `block`."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.types import VerificationPolicy
from tests.sampling.block_gain import (
    CLASS_DRAFTS,
    NUM_DRAFTS,
    NUM_PAIRS,
    Gains,
    RandomPair,
    expected_accepted,
    measure,
    rows_by_class,
    rows_by_drafts,
)
from tests.sampling.formulas import Pair

REPORT = Path(__file__).parents[2] / "docs" / "reports" / "block_policy.md"


@pytest.fixture(scope="module")
def gains() -> Gains:
    """Every pair of the report, up to four drafts."""
    return measure(NUM_PAIRS, CLASS_DRAFTS)


@pytest.mark.parametrize("number", [0, 5, 10])
def test_the_closed_form_is_what_the_acceptance_probabilities_give(number: int) -> None:
    rejection, block = expected_accepted(RandomPair(number), 3)
    pair = Pair(VerificationPolicy.BLOCK, *RandomPair(number).tables())
    for num_drafts in (1, 2, 3):
        assert block[num_drafts - 1] == pytest.approx(pair.expected_accepted(num_drafts), rel=1e-6)
        alone = replace(pair, policy=VerificationPolicy.REJECTION)
        assert rejection[num_drafts - 1] == pytest.approx(alone.expected_accepted(num_drafts), rel=1e-6)


def test_no_pair_of_a_thousand_loses_and_on_average_they_gain(gains: Gains) -> None:
    assert (gains.block - gains.rejection).min() > -1e-12
    for num_drafts in (2, 3, 4):
        assert gains.percent(num_drafts).mean() > 0.5


def test_the_committed_figures_are_what_the_pairs_give(gains: Gains) -> None:
    lines = REPORT.read_text().splitlines()
    again = [count for count in NUM_DRAFTS if count <= CLASS_DRAFTS]
    for row in rows_by_drafts(gains, again):
        assert row in lines
    for row in rows_by_class(gains, (2, CLASS_DRAFTS)):
        assert any(line.startswith(row[:-2]) for line in lines), row
