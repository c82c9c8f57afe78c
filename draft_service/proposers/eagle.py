"""Proposer `eagle`: a head of one layer drafts from the target's hidden states, then from its own.

Its row j reads token j + 1 of the sequence and what the target's row j has become, and gives the draft for token j + 2:
inputs are shifted by one. Rows of drafts hold the head's own states; they are dropped when the drafts are made, and the
next round feeds those that were accepted with the target's.

Letters: A sessions whose next draft a forward decides, L layers of the target, E hidden size, V vocabulary, U ids of
the reduced one.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draft_service.proposers.base import HiddenStatesNeed, ProposeInput, SessionKey
from draft_service.proposers.draft_round import DraftRound
from draft_service.proposers.kind import OptionGroup, ProposerError, ProposerSettings
from draft_service.proposers.model_base import ModelIdentity, ModelProposer
from engine.backends.base import HiddenCapture, SequenceInput, SpeculativeEngine
from engine.backends.torch_backend import TorchEngine
from engine.backends.torch_loading import DTYPES
from engine.heads.artefact import load_artefact
from engine.heads.eagle import EagleHead, build_eagle
from engine.kernels.choice import choose_kernels
from engine.models.config import ModelFileError
from engine.models.linear import ChunkedLinear, PackedLinear, packed_linear_is_available
from engine.models.loading import load_model
from tandem.defaults import MAX_STEP_TOKENS
from tandem.models import ModelNotFoundError, resolve_model
from tandem.vocabulary import Vocabulary, VocabularyError

DEFAULT_KV_MEMORY_BYTES = 64 << 20
_OWN_LAYER = (1,)


class EagleProposer(ModelProposer):
    """Drafts with a head on an engine of its own."""

    def __init__(
        self,
        engine: SpeculativeEngine,
        head: EagleHead,
        identity: ModelIdentity,
        max_step_tokens: int = MAX_STEP_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine` runs `head`."""
        super().__init__(engine, identity, max_step_tokens, clock)
        self._head = head
        self._states: dict[SessionKey, torch.Tensor] = {}  # float32 [n, E]: what the next forward reads

    def _tokens_of(self, item: ProposeInput) -> Sequence[int]:
        return item.committed_token_ids[1:]

    def _num_wanted(self, item: ProposeInput) -> int:
        return super()._num_wanted(item) if len(item.committed_token_ids) > 1 else 0

    def _begin(self, planned: Sequence[DraftRound]) -> set[SessionKey]:
        lost = {draft.key for draft in planned if not _has_rows(draft)}
        fed = [draft for draft in planned if draft.key not in lost and draft.num_fed]
        self._states = {}
        if fed:
            rows = [self._target_rows(draft) for draft in fed]
            fused = torch.split(self._head.fuse(torch.cat(rows)), [len(part) for part in rows])
            self._states = {draft.key: part for draft, part in zip(fed, fused, strict=True)}
        return lost

    def _target_rows(self, draft: DraftRound) -> torch.Tensor:
        """The target's states for the tokens that the first forward feeds, bfloat16 [num_fed, L, E]."""
        need = self.capabilities.hidden_states
        assert need is not None
        start = _first_pending(draft)
        chunks = draft.item.hidden_states
        data = torch.frombuffer(bytearray(b"".join(chunk.data for chunk in chunks)), dtype=torch.bfloat16)
        states = data.view(-1, len(need.layers), need.size)
        first = start - chunks[0].first_row
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


def _first_pending(draft: DraftRound) -> int:
    """The row of the first token that is fed."""
    return len(draft.tokens) - len(draft.pending)


def _has_rows(draft: DraftRound) -> bool:
    """Whether the input has the target's row for every token that has none here."""
    chunks = draft.item.hidden_states
    return bool(chunks) and chunks[0].first_row <= _first_pending(draft)


def add_options(group: OptionGroup) -> None:
    """Which head."""
    group.add_argument(
        "--head",
        type=Path,
        metavar="DIR",
        help="a trained head; --model names the target that it was trained for",
    )


def load_eagle(settings: ProposerSettings) -> EagleProposer:
    """Load head and target; ProposerError without either, ArtefactError for a head that does not fit."""
    options: argparse.Namespace = settings.options
    if settings.engine is None or options.head is None:
        raise ProposerError("needs a head and its target: name them with --head DIR and --model")
    settings.limits.check_step(settings.engine.max_step_tokens)
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
    head = build_eagle(load_artefact(options.head), target, dtype, linear, context)
    block_size = settings.engine.block_size
    block_bytes = head.config.kv_bytes_per_token(dtype.itemsize) * block_size
    engine = TorchEngine(
        head,
        choose_kernels(head.config),
        num_blocks=(settings.engine.kv_memory_bytes or DEFAULT_KV_MEMORY_BYTES) // block_bytes,
        block_size=block_size,
    )
    settings.limits.check_memory(engine.kv_usage())
    need = HiddenStatesNeed(head.layers, head.config.hidden_size)
    identity = ModelIdentity("eagle", options.head.name, vocabulary.id_bytes_hash, need)
    return EagleProposer(engine, head, identity, settings.engine.max_step_tokens)
