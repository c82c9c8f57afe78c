"""A short form of every kind of toy cell through the real services, and one wrong rule of every policy."""

import pytest

from tests import every_proposer
from tests.losslessness import results, toy
from tests.losslessness.cells import ALPHA, CELLS, WRONG_CELLS, Cell

NUM_TOKENS = 1000
KINDS = (
    "toy:coupled:draft_model:coupled:processors",
    "toy:rejection:random:sparse",
    "toy:rejection:eos:one_hot:past EOS and to EOS",
    "toy:rejection:often EOS:sparse:no EOS yet",
    "toy:block:constant:one_hot",
    "toy:block:reversed:full",
)
# A shared stream of noise takes tens of thousands of tokens to see.
PLAIN_TO_SEE = [cell for cell in WRONG_CELLS if "noise" not in str(cell.rule)]


OF_EVERY_PROPOSER = [
    cell for cell in CELLS if cell.model == "toy" and cell.drafts in every_proposer.NAMES and cell.mix == "past EOS"
]


@pytest.mark.parametrize(
    "cell", [*OF_EVERY_PROPOSER, *(cell for cell in CELLS if cell.name in KINDS)], ids=lambda cell: cell.name
)
def test_what_comes_out_is_distributed_as_the_target(cell: Cell) -> None:
    outcome = results.measure(cell, NUM_TOKENS, toy.run)
    assert outcome.num_tokens == NUM_TOKENS
    assert outcome.num_accepted > 0
    assert outcome.smallest_p > ALPHA


@pytest.mark.parametrize("cell", PLAIN_TO_SEE, ids=lambda cell: cell.rule)
def test_a_wrong_rule_is_found(cell: Cell) -> None:
    assert results.measure(cell, 2 * NUM_TOKENS, toy.run).smallest_p < ALPHA


def test_every_kind_is_a_cell() -> None:
    assert set(KINDS) <= {cell.name for cell in CELLS}
    assert {cell.drafts for cell in OF_EVERY_PROPOSER} == set(every_proposer.NAMES)
