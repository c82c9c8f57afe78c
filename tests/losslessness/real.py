"""A real cell: the demo model in three processes, drafted for by prompt lookup or by a shallow copy of itself."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.backends.registry import LoadedEngine, load_engine
from engine.backends.settings import EngineSettings
from tandem.client import TandemClient
from tandem.models import resolve_model
from tandem.processes import ClusterPlan, LocalCluster
from tandem.rng import F64
from tests.e2e.identity import load_fixture
from tests.losslessness import suspects
from tests.losslessness.answers import Answer, Request, collect
from tests.losslessness.cells import Cell
from tests.losslessness.shallow import write_shallow_copy
from tests.losslessness.transform import Reference, uniforms

MODEL = "smollm2-135m"
DTYPE, DRAFT_DTYPE = "float32", "bfloat16"
SKIPPED_LAYERS = (14, 15)
CONCURRENCY = 16
MAX_PROMPT_LEN = 96
THREADS = {"ngram": 2, "draft_model": 1}  # of each model service
PATIENCE = ["--draft-timeout", "120"]  # a busy machine is no reason to decode without drafts


@dataclass(frozen=True, slots=True)
class RealAnswers:
    """What came through the processes, and whose logits decided it."""

    answers: list[Answer]
    numerics_fingerprint: str  # of the target service's engine


@dataclass(frozen=True, slots=True)
class Engines:
    """The models that the services run, loaded here."""

    target: LoadedEngine
    draft: LoadedEngine


class OtherNumericsError(Exception):
    """The engine here and the target service's differ; its logits would not be the target's."""


def run(cell: Cell, num_tokens: int) -> tuple[list[Answer], F64]:
    """The cell's answers, and the numbers [O, num_tokens] of their first `num_tokens` tokens."""
    with shallow_copy() as directory:
        with LocalCluster(plan(cell, directory), quiet=True) as cluster:
            came = ask(cell, cluster.addresses["orchestrator"], num_tokens)
        return came.answers, judge(cell, came, load_engines(directory), num_tokens)


@contextmanager
def shallow_copy() -> Iterator[Path]:
    """The draft model's directory, while it is needed."""
    with tempfile.TemporaryDirectory(prefix="tandem-shallow-") as directory:
        yield write_shallow_copy(resolve_model(MODEL), SKIPPED_LAYERS, Path(directory))


def plan(cell: Cell, draft_directory: Path) -> ClusterPlan:
    """One process of each service."""
    threads = ["--threads", str(THREADS[cell.drafts])]
    return ClusterPlan(
        target=["--model", MODEL, "--dtype", DTYPE, *threads],
        draft=draft_arguments(draft_directory) if cell.drafts == "draft_model" else ["--proposer", "ngram"],
        orchestrator=["--model", MODEL, *PATIENCE],
    )


def draft_arguments(draft_directory: Path) -> list[str]:
    """The options of a draft service around the shallow copy."""
    threads = ["--threads", str(THREADS["draft_model"])]
    return ["--proposer", "draft_model", "--model", str(draft_directory), "--dtype", DRAFT_DTYPE, *threads]


def ask(cell: Cell, address: str, num_tokens: int) -> RealAnswers:
    """Send the cell's requests to the orchestrator at `address`."""
    prompts = [tuple(case["prompt_ids"]) for case in load_fixture() if len(case["prompt_ids"]) <= MAX_PROMPT_LEN]

    def make_request(number: int) -> Request:
        return cell.request(number, prompts[number % len(prompts)])

    async def collect_all() -> RealAnswers:
        async with TandemClient(address) as client:
            fingerprint = (await client.info()).targets[0].model.numerics_fingerprint
            return RealAnswers(await collect(client, make_request, num_tokens, CONCURRENCY), fingerprint)

    return asyncio.run(collect_all())


def load_engines(draft_directory: Path) -> Engines:
    """Target and shallow copy."""
    return Engines(
        load_engine(EngineSettings(model=MODEL, dtype=DTYPE)),
        load_engine(EngineSettings(model=str(draft_directory), dtype=DRAFT_DTYPE)),
    )


def judge(cell: Cell, came: RealAnswers, engines: Engines, num_tokens: int) -> F64:
    """The numbers [O, num_tokens] of the answers' tokens.

    OtherNumericsError unless the engine here computes bit for bit what the target service's does.
    """
    target = engines.target.engine
    here = target.capabilities.numerics_fingerprint
    if here != came.numerics_fingerprint:
        raise OtherNumericsError(f"the target service computes as {came.numerics_fingerprint!r}, not as {here!r}")
    if cell.drafts == "draft_model":
        log_q = suspects.of_engine(engines.draft.engine)
    else:
        log_q = suspects.of_prompt_lookup(target.capabilities.vocab_size)
    reference = Reference(target, engines.target.vocabulary.eos_token_ids, log_q)
    return uniforms(reference, came.answers, num_tokens, cell.seed)
