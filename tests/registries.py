"""The metrics of the three services, without the services."""

from draft_service.metrics import DraftMetrics
from orchestrator.addresses import find_addresses
from orchestrator.metrics import OrchestratorMetrics
from orchestrator.pools import draft_pool, target_pool
from tandem.serving.metrics import COMPONENT, Metrics
from tandem.types import Load
from tandem.vocabulary import Vocabulary
from target_service.metrics import TargetMetrics


def all_metrics() -> list[Metrics]:
    """Of each kind of process."""
    vocabulary, find = Vocabulary.toy(8), find_addresses("127.0.0.1:1")
    targets = target_pool(find, vocabulary, "toy")
    drafts = draft_pool(find, vocabulary, "toy", targets)
    return [
        OrchestratorMetrics(targets, drafts, lambda: 0).all,
        TargetMetrics(Load).all,
        DraftMetrics(Load).all,
    ]


def sample_labels(metrics: Metrics) -> dict[str, set[str]]:
    """The labels of every sample that a process exports, by the sample's name."""
    found: dict[str, set[str]] = {}
    for family in metrics.families:
        labels = {COMPONENT, *family.labels}
        if family.kind == "histogram":
            found[f"{family.name}_bucket"] = labels | {"le"}
            found[f"{family.name}_sum"] = found[f"{family.name}_count"] = labels
        else:
            found[family.name] = labels
    return found
