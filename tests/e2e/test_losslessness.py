"""On the real model, through processes: sampled text is distributed as plain decoding's under every policy.

Short forms; `make losslessness` runs every combination in full and writes docs/reports/losslessness.md.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.losslessness import real, results
from tests.losslessness.cells import ALPHA, CELLS, Cell

pytestmark = pytest.mark.model

NUM_TOKENS = 1500
LOCAL = ["--address", "127.0.0.1:0"]


@pytest.fixture(scope="module")
def shallow(float32: Deployment) -> Iterator[Path]:
    """The draft model's directory; the deployment comes first, since it skips where there is no model."""
    with real.shallow_copy() as directory:
        yield directory


@pytest.fixture(scope="module")
def engines(shallow: Path) -> real.Engines:
    return real.load_engines(shallow)


@pytest.fixture(scope="module")
def addresses(float32: Deployment, shallow: Path) -> Iterator[dict[str, str]]:
    """Orchestrators by how they draft, in front of the shared target."""
    cluster = float32.cluster
    draft = cluster.start("draft", [*real.draft_arguments(shallow), *LOCAL])
    cluster.wait_ready(draft)
    links = ["--target", cluster.addresses["target"], "--draft", draft.address]
    front = cluster.start("orchestrator", ["--model", MODEL, *real.PATIENCE, *links, *LOCAL])
    cluster.wait_ready(front)
    yield {"ngram": float32.ngram, "draft_model": front.address}
    for service in (front, draft):
        service.stop(cluster.plan.grace_s)


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.model == "real"], ids=lambda cell: cell.name)
def test_what_comes_out_is_distributed_as_the_target(
    cell: Cell, addresses: dict[str, str], engines: real.Engines
) -> None:
    def run(cell: Cell, num_tokens: int) -> "tuple[list[real.Answer], real.F64]":
        came = real.ask(cell, addresses[cell.drafts], num_tokens)
        return came.answers, real.judge(cell, came, engines, num_tokens)

    outcome = results.measure(cell, NUM_TOKENS, run)
    assert outcome.num_tokens == NUM_TOKENS
    assert outcome.num_accepted > 0
    assert outcome.smallest_p > ALPHA
