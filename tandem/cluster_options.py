"""The options by which `up` and `generate` choose models and drafts, and the processes they stand for."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from tandem.defaults import MAX_DRAFT_TOKENS
from tandem.processes import ClusterPlan

Model = Annotated[str, typer.Option(help="Target: a pulled name, a model directory or a .gguf file.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16, for target and draft model.")]
DraftModel = Annotated[
    str | None, typer.Option(help="Draft with this model (name or path; the target's own is allowed).")
]
PromptLookup = Annotated[bool, typer.Option(help="Draft by prompt lookup when there is no draft model.")]
NumDraftTokens = Annotated[int, typer.Option(min=0, max=MAX_DRAFT_TOKENS, help="Most drafts a round; 0: none.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Compute threads of each model service.")]
Toy = Annotated[
    str | None,
    typer.Option(help="A toy engine (--draft-model then names one too), e.g. hashed:vocab=512,seed=3."),
]


class OptionError(Exception):
    """Options that do not fit together; the message names them."""


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """What a user asked for; `plan` turns it into processes."""

    model: str
    dtype: str
    draft_model: str | None
    prompt_lookup: bool
    num_draft_tokens: int
    threads: int | None
    toy: str | None = None
    insecure: bool = False

    def plan(self, host: str = "127.0.0.1", port: int = 0) -> ClusterPlan:
        """The orchestrator on `port`, target and draft on the next two; free ports for 0."""
        if not 0 <= port <= 65533:
            raise OptionError(f"--port {port} is outside 0..65533 (three consecutive ports are needed)")
        ports = (port, port + 1, port + 2) if port else (0, 0, 0)
        front, target, draft = (f"{host}:{number}" for number in ports)
        common = ["--insecure"] if self.insecure else []
        tokenizer = ["--toy-vocab", toy_vocab(self.toy)] if self.toy else ["--model", self.model]
        return ClusterPlan(
            target=[*self._engine_arguments(self.toy or self.model), *common],
            draft=self._draft_arguments(common),
            orchestrator=[*tokenizer, "--num-draft-tokens", str(self.num_draft_tokens), *common],
            target_address=target,
            draft_address=draft,
            orchestrator_address=front,
        )

    def _engine_arguments(self, model: str) -> list[str]:
        threads = ["--threads", str(self.threads)] if self.threads else []
        if self.toy:
            return ["--toy", model, *threads]
        return ["--model", model, "--dtype", self.dtype, *threads]

    def _draft_arguments(self, common: list[str]) -> list[str] | None:
        if self.draft_model is not None:
            return ["--proposer", "draft_model", *self._engine_arguments(self.draft_model), *common]
        if self.prompt_lookup:
            return ["--proposer", "ngram", *common]
        return None


def toy_vocab(toy: str) -> str:
    """The vocabulary size a toy engine's options name; OptionError without one."""
    match = re.search(r"\bvocab=(\d+)\b", toy)
    if match is None:
        raise OptionError(f"--toy {toy!r} must name its vocabulary, e.g. hashed:vocab=512")
    return match[1]


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Inside, SIGTERM and a closed terminal raise KeyboardInterrupt like Ctrl-C: children are stopped in order."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
