"""What the services export, and what a query asks for that none of them does."""

import re

from tests.deploy.promql import Selector, read_promql
from tests.registries import all_metrics, sample_labels

SAMPLES = {metrics.component: sample_labels(metrics) for metrics in all_metrics()}
PHASES = {
    values[0]
    for metrics in all_metrics()
    for family in metrics.families
    if family.name == "tandem_round_phase_seconds"
    for values, _ in family.read()
}
TARGET_LABELS = {"instance", "job", "namespace", "pod"}  # which Prometheus adds to what it scrapes


def complaints(expression: str, legend: str = "") -> list[str]:
    """What an expression, and its legend, ask for that nobody exports."""
    read = read_promql(expression)
    found = [] if read.selectors else ["it names no metric"]
    for selector in read.selectors:
        found += _complaints_of(selector, read.grouping)
    known = set(read.grouping)
    if not read.is_aggregated and read.selectors:
        known = TARGET_LABELS.union(*(labels.get(read.selectors[0].metric, set()) for labels in SAMPLES.values()))
    return found + [f"legend: {label}" for label in re.findall(r"\{\{(\w+)\}\}", legend) if label not in known]


def _complaints_of(selector: Selector, grouping: set[str]) -> list[str]:
    """Each component that is asked for must export it, one of them where none is named."""
    _, asked = selector.matchers.get("component", ("", ""))
    components = [one for one in SAMPLES if re.fullmatch(asked or ".*", one)]
    exporting = [one for one in components if selector.metric in SAMPLES[one]]
    if not exporting or (asked and exporting != components):
        return [f"{selector.metric} of {asked or 'any service'}"]
    known = set.intersection(*(SAMPLES[one][selector.metric] for one in exporting))
    found = [
        f"{selector.metric}: {label}"
        for label in sorted((selector.matchers.keys() | grouping) - known - TARGET_LABELS)
    ]
    _, phases = selector.matchers.get("phase", ("", ""))
    return found + [f"phase {phase}" for phase in phases.split("|") if phase and phase not in PHASES]
