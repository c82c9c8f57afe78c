"""Real processes for end-to-end tests: one target, and two orchestrators that draft for it in different ways."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tandem.processes import ClusterPlan, LocalCluster

MODEL = "smollm2-135m"


@dataclass(frozen=True)
class Deployment:
    """Orchestrators by how they draft; both stand on the same target process."""

    ngram: str  # HOST:PORT
    self_draft: str  # the target's model drafts for itself
    cluster: LocalCluster


@contextlib.contextmanager
def deployment(model_arguments: list[str], tokenizer_arguments: list[str]) -> Iterator[Deployment]:
    """Run target, two draft services and two orchestrators; the arguments choose the model and its tokenizer."""
    plan = ClusterPlan(target=model_arguments, draft=["--proposer", "ngram"], orchestrator=tokenizer_arguments)
    with LocalCluster(plan, quiet=True) as cluster:
        local = ["--address", "127.0.0.1:0"]
        draft = cluster.start("draft", ["--proposer", "draft_model", *model_arguments, *local])
        cluster.wait_ready(draft)
        links = ["--target", cluster.addresses["target"], "--draft", draft.address]
        drafts = [
            "--no-draft-fallback",
            "--draft-timeout",
            "60",
        ]  # every draft is the service's, however busy it is
        front = cluster.start("orchestrator", [*tokenizer_arguments, *links, *drafts, *local])
        cluster.wait_ready(front)
        yield Deployment(cluster.addresses["orchestrator"], front.address, cluster)


def real_model(dtype: str) -> contextlib.AbstractContextManager[Deployment]:
    """The demo model in one precision, one thread a model service: they share two cores."""
    return deployment(["--model", MODEL, "--dtype", dtype, "--threads", "1"], ["--model", MODEL])
