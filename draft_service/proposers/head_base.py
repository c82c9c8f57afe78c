"""What proposers share that draft with a head over the target's hidden states, and how one is loaded.

A head reads a token and a state a row. Its first forward of a round reads the target's states, further ones its own.
Rows of drafts are dropped when the drafts are made; the next round feeds what was accepted with the target's states.

Letters: A sessions whose next draft a forward decides, L layers of the target, E hidden size, V vocabulary, U ids of
the reduced one.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from draft_service.proposers.base import HiddenStatesNeed, ProposeInput, SessionKey
from draft_service.proposers.draft_round import DraftRound
from draft_service.proposers.kind import ProposerError, ProposerSettings
from draft_service.proposers.model_base import Drafting, ModelIdentity, ModelProposer, drafting_of
from engine.backends.base import HiddenCapture, SequenceInput, SpeculativeEngine
from engine.backends.torch_backend import TorchEngine
from engine.backends.torch_loading import DTYPES
from engine.heads.artefact import Artefact, load_artefact
from engine.kernels.choice import choose_kernels
from engine.models.config import LoadedModel, ModelFileError
from engine.models.decoder import DecoderModel
from engine.models.linear import ChunkedLinear, LinearType, PackedLinear, packed_linear_is_available
from engine.models.loading import load_model
from tandem.models import ModelNotFoundError, resolve_model
from tandem.vocabulary import Vocabulary, VocabularyError

KV_MEMORY_BYTES = 64 << 20  # by default: a row of a head takes little
_OWN_LAYER = (1,)


class Head(DecoderModel, Protocol):
    """A decoder over states."""

    @property
    def layers(self) -> tuple[int, ...]:
        """[L] of the target, whose states it reads."""
        ...

    @property
    def token_ids(self) -> torch.Tensor:
        """Int64 [U], ascending: the target's ids of its logits."""
        ...

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [rows, L, E] -> what its rows read, float32 [rows, E]."""
        ...


class HeadProposer(ModelProposer):
    """Drafts with a head on an engine of its own."""

    def __init__(
        self,
        engine: SpeculativeEngine,
        head: Head,
        identity: ModelIdentity,
        drafting: Drafting = Drafting(),  # noqa: B008 - frozen
    ) -> None:
        """`engine` runs `head`."""
        super().__init__(engine, identity, drafting)
        self._head = head
        self._states: dict[SessionKey, torch.Tensor] = {}  # float32 [n, E]: what the next forward reads

    @abstractmethod
    def _first_row(self, draft: DraftRound) -> int:
        """The target's row whose state the first token of the next forward is read with."""

    def _num_wanted(self, item: ProposeInput) -> int:
        return super()._num_wanted(item) if len(item.committed_token_ids) > 1 else 0

    def _begin(self, planned: Sequence[DraftRound]) -> set[SessionKey]:
        lost = {draft.key for draft in planned if not self._has_rows(draft)}
        fed = [draft for draft in planned if draft.key not in lost and draft.num_fed]
        self._states = {}
        if fed:
            rows = [self._target_rows(draft) for draft in fed]
            fused = torch.split(self._head.fuse(torch.cat(rows)), [len(part) for part in rows])
            self._states = {draft.key: part for draft, part in zip(fed, fused, strict=True)}
        return lost

    def _has_rows(self, draft: DraftRound) -> bool:
        """Whether the input has the target's row for every token that has none here."""
        chunks = draft.item.hidden_states
        return bool(chunks) and chunks[0].first_row <= self._first_row(draft)

    def _target_rows(self, draft: DraftRound) -> torch.Tensor:
        """The target's states for the tokens that the first forward feeds, bfloat16 [num_fed, L, E]."""
        chunks = draft.item.hidden_states
        data = torch.frombuffer(bytearray(b"".join(chunk.data for chunk in chunks)), dtype=torch.bfloat16)
        states = data.view(-1, len(self._head.layers), self._head.config.hidden_size)
        first = self._first_row(draft) - chunks[0].first_row
        return states[first : first + draft.num_fed]

    def _input(self, draft: DraftRound) -> SequenceInput:
        num_rows = 0 if draft.is_behind else 1
        fed = draft.pending[: draft.num_fed]
        return SequenceInput(self.kv.sequence_id(draft.key), fed, num_rows, self._states[draft.key])

    def _capture(self) -> HiddenCapture | None:
        return HiddenCapture(_OWN_LAYER)

    def _took(self, fed: Sequence[DraftRound], capture: HiddenCapture | None) -> None:
        assert capture is not None
        assert capture.states is not None
        end = 0
        for draft in fed:
            end += draft.num_fed
            self._states[draft.key] = capture.states[end - 1 : end, 0]

    def _finish(self, draft: DraftRound) -> None:
        self.kv.truncate(draft.key, len(draft.tokens))

    def _in_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        # [A, V]
        everywhere = logits.new_full((len(logits), self._head.config.vocab_size), -torch.inf)
        everywhere[:, self._head.token_ids] = logits
        return everywhere

    def _token_id(self, index: int) -> int:
        return int(self._head.token_ids[index])


BuildHead = Callable[[Artefact, LoadedModel, torch.dtype, LinearType, int], Head]  # the last: most tokens


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head on its engine, and what the handshake says of it."""

    engine: TorchEngine
    head: Head
    identity: ModelIdentity
    drafting: Drafting


def load_head(settings: ProposerSettings, proposer: str, build: BuildHead) -> LoadedHead:
    """The head of --head over the target of --model.

    ProposerError without either, ArtefactError for a head that does not fit, ValueError for limits it cannot serve.
    """
    directory: Path | None = settings.options.head
    if settings.engine is None or directory is None:
        raise ProposerError("needs a head and its target: name them with --head DIR and --model")
    settings.limits.check_step(settings.engine.max_step_tokens)
    drafting = drafting_of(settings)
    try:
        path = resolve_model(settings.engine.model)
        vocabulary, target = Vocabulary.load(path), load_model(path)
    except (ModelNotFoundError, ModelFileError, VocabularyError) as error:
        raise ProposerError(f"model {settings.engine.model!r}: {error}") from error
    if settings.engine.threads is not None:
        torch.set_num_threads(settings.engine.threads)
    dtype = DTYPES[settings.engine.dtype]
    linear = PackedLinear if packed_linear_is_available(dtype) else ChunkedLinear
    context = min(settings.engine.max_context or target.config.max_context, target.config.max_context)
    head = build(load_artefact(directory), target, dtype, linear, context)
    block_size = settings.engine.block_size
    block_bytes = head.config.kv_bytes_per_token(dtype.itemsize) * block_size
    engine = TorchEngine(
        head,
        choose_kernels(head.config),
        num_blocks=(settings.engine.kv_memory_bytes or KV_MEMORY_BYTES) // block_bytes,
        block_size=block_size,
    )
    settings.limits.check_memory(engine.kv_usage())
    need = HiddenStatesNeed(head.layers, head.config.hidden_size)
    identity = ModelIdentity(proposer, directory.name, vocabulary.id_bytes_hash, need)
    return LoadedHead(engine, head, identity, drafting)
