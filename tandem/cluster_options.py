"""The options by which `up` and `generate` choose models and drafts, and the processes they stand for."""

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Annotated

import typer

from tandem.defaults import MAX_DRAFT_TOKENS
from tandem.processes import ClusterPlan
from tandem.serving.channels import parse_address

Model = Annotated[str, typer.Option(help="Target: a pulled name, a model directory or a .gguf file.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16, for target and draft model.")]
DraftModel = Annotated[
    str | None,
    typer.Option(help="Draft with this model (name or path; the target's own is allowed). Default: none."),
]
ProposerName = Annotated[
    str | None,
    typer.Option(
        "--proposer",
        help="What drafts: ngram, suffix, draft_model, eagle, mtp, or any other name that `tandem serve draft --help` "
        "lists, such as synthetic. "
        "Default: draft_model with --draft-model, else ngram.",
    ),
]
Head = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR", help="Trained drafts for the target, bundled or your own: of eagle, mtp, draft_model."
    ),
]
PromptLookup = Annotated[bool, typer.Option(help="Draft by prompt lookup when there is no draft model.")]
NumDraftTokens = Annotated[int, typer.Option(min=0, max=MAX_DRAFT_TOKENS, help="Most drafts a round; 0: none.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Compute threads of each model service. Default: all cores.")
]
Toy = Annotated[
    str | None,
    typer.Option(
        help="A toy engine instead of the model, e.g. hashed:vocab=512,seed=3; --draft-model names one too."
    ),
]

# Passed on as they are: their defaults and limits are the services' own, and theirs alone.
KvMemory = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Key-value memory of each model, e.g. 64M or 2G."),
]
BlockSize = Annotated[int | None, typer.Option(help="Tokens a block of that memory.")]
PrefixCache = Annotated[
    bool | None,
    typer.Option(help="Keep rows for later requests that begin with the same tokens."),
]
MaxContext = Annotated[int | None, typer.Option(help="Most tokens of a request, prompt and answer.")]
MaxStepTokens = Annotated[int | None, typer.Option(help="Most tokens of one forward.")]
MaxPrefillTokens = Annotated[
    int | None,
    typer.Option(help="Most prompt tokens of a target's forward while others decode."),
]
MaxBatch = Annotated[int | None, typer.Option(help="Most requests of a forward, at target and draft.")]
MaxSessions = Annotated[int | None, typer.Option(help="Most requests the target runs at once; others wait.")]
SessionLease = Annotated[
    float | None,
    typer.Option(metavar="S", help="Seconds until an abandoned session is freed."),
]
MaxRequests = Annotated[
    int | None,
    typer.Option(help="Most requests at the orchestrator; more are refused."),
]


class OptionError(Exception):
    """Options that do not fit together; the message names them."""


@dataclass(frozen=True, slots=True)
class PassedOptions:
    """Options of the services that a user set; the fields are called like the options, None leaves one out."""

    kv_memory: str | None = None
    block_size: int | None = None
    prefix_cache: bool | None = None
    max_context: int | None = None
    max_step_tokens: int | None = None
    max_prefill_tokens: int | None = None
    max_batch: int | None = None
    max_sessions: int | None = None
    session_lease: float | None = None
    max_requests: int | None = None

    def arguments(self, names: Collection[str]) -> list[str]:
        """Those of these names, as a service's command line takes them."""
        found = []
        for field in fields(self):
            value, option = getattr(self, field.name), field.name.replace("_", "-")
            if value is None or field.name not in names:
                continue
            found += (
                [f"--{option}" if value else f"--no-{option}"]
                if isinstance(value, bool)
                else [f"--{option}", str(value)]
            )
        return found


_ENGINE_OPTIONS = frozenset(
    {"kv_memory", "block_size", "prefix_cache", "max_step_tokens"}
)  # target and draft model
_MODEL_SERVICE_OPTIONS = frozenset({"max_batch", "session_lease"})
_TARGET_OPTIONS = frozenset({"max_context", "max_prefill_tokens", "max_sessions"})
_ORCHESTRATOR_OPTIONS = frozenset({"max_requests"})


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
    passed: PassedOptions = PassedOptions()
    proposer: str | None = None  # None: as draft_model and prompt_lookup say
    head: str | None = None  # what was trained for the target: a directory, or a name that comes with the package
    metrics_address: str | None = (
        None  # of the orchestrator's figures; target's and draft's are at the next two ports
    )

    def plan(self, host: str = "127.0.0.1", port: int = 0) -> ClusterPlan:
        """The orchestrator on `port`, target and draft on the next two; free ports for 0. AddressError, OptionError."""
        front, target, draft = _three("--port", host, port)
        metrics: list[list[str]] = [[], [], []]
        if self.metrics_address is not None:
            addresses = _three("--metrics-address", *parse_address(self.metrics_address))
            metrics = [["--metrics-address", one] for one in addresses]
        common = ["--insecure"] if self.insecure else []
        tokenizer = ["--toy-vocab", toy_vocab(self.toy)] if self.toy else ["--model", self.model]
        return ClusterPlan(
            target=[
                *self._engine_arguments(self.toy or self.model),
                *self.passed.arguments(_MODEL_SERVICE_OPTIONS | _TARGET_OPTIONS),
                *common,
                *metrics[1],
            ],
            draft=self._draft_arguments([*common, *metrics[2]]),
            orchestrator=[
                *tokenizer,
                *("--num-draft-tokens", str(self.num_draft_tokens)),
                *self.passed.arguments(_ORCHESTRATOR_OPTIONS),
                *common,
                *metrics[0],
            ],
            target_address=target,
            draft_address=draft,
            orchestrator_address=front,
        )

    def _engine_arguments(self, model: str) -> list[str]:
        common = ["--threads", str(self.threads)] if self.threads else []
        common += self.passed.arguments(_ENGINE_OPTIONS)
        if self.toy:
            return ["--toy", model, *common]
        return ["--model", model, "--dtype", self.dtype, *common]

    def _draft_arguments(self, common: list[str]) -> list[str] | None:
        if self.proposer is not None and self.draft_model is None and not self.prompt_lookup:
            raise OptionError(f"--no-prompt-lookup means no drafts, and --proposer {self.proposer} means drafts")
        if self.head is not None and self.proposer is None:
            raise OptionError(f"--head {self.head} needs --proposer: eagle, mtp or draft_model")
        common = [*self.passed.arguments(_MODEL_SERVICE_OPTIONS), *common]
        model = [] if self.draft_model is None else self._engine_arguments(self.draft_model)
        if self.head is not None:
            model = [*(model or self._engine_arguments(self.model)), "--head", self.head]
        name = self.proposer or ("draft_model" if model else "ngram")
        return ["--proposer", name, *model, *common] if model or self.prompt_lookup else None


def _three(option: str, host: str, port: int) -> list[str]:
    """Addresses of orchestrator, target and draft: consecutive ports, or three times 0."""
    if not 0 <= port <= 65533:
        raise OptionError(f"{option} {port} is outside 0..65533 (three consecutive ports are needed)")
    return [f"{host}:{port + number if port else 0}" for number in range(3)]


def toy_vocab(toy: str) -> str:
    """The vocabulary size a toy engine's options name; OptionError without one."""
    match = re.search(r"\bvocab=(\d+)\b", toy)
    if match is None:
        raise OptionError(f"--toy {toy!r} must name its vocabulary, e.g. hashed:vocab=512")
    return match[1]
