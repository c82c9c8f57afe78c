"""What proposers share that draft with a head over the target's hidden states.

A head reads a token, a state and a hint a row. Its first forward of a round reads the target's states, further ones
its own. Rows of drafts are dropped when the drafts are made; the next round feeds what was accepted with the target's
states.

Letters: A sessions whose next draft a forward decides, L layers of the target, E hidden size, V vocabulary, U ids of
the reduced one.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from draft_service.proposers.base import HiddenStatesNeed, ProposeInput, SessionKey
from draft_service.proposers.draft_kv import common_prefix_len
from draft_service.proposers.draft_round import DraftRound
from draft_service.proposers.kind import ProposerSettings
from draft_service.proposers.model_base import Drafting, ModelIdentity, ModelProposer
from draft_service.proposers.over_target import OverTarget, read_over_target
from engine.backends.base import HiddenCapture, SequenceInput, SpeculativeEngine
from engine.backends.torch_backend import TorchEngine
from engine.heads.hints import Hints
from engine.models.decoder import DecoderModel
from tandem.ngram_index import NgramIndex, Recurrence

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

    @property
    def hints(self) -> Hints:
        """What makes its rows' input of states and recurrences."""
        ...

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [rows, L, E] -> one state a row, float32 [rows, E]."""
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
        super().__init__(engine, identity, drafting, head.token_ids)
        self._head = head
        self._states: dict[SessionKey, torch.Tensor] = {}  # float32 [n, E]: what the next forward reads
        self._indices: dict[SessionKey, NgramIndex] = {}  # of committed tokens, in a round of its drafts too

    @abstractmethod
    def _first_row(self, draft: DraftRound) -> int:
        """The target's row whose state the first token of the next forward is read with."""

    def _num_wanted(self, item: ProposeInput) -> int:
        return super()._num_wanted(item) if len(item.committed_token_ids) > 1 else 0

    def _begin(self, planned: Sequence[DraftRound]) -> set[SessionKey]:
        lost = {draft.key for draft in planned if not self._has_rows(draft)}
        fed = [draft for draft in planned if draft.key not in lost and draft.num_fed]
        self._states = {}
        for draft in fed:
            self._follow(draft)
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

    def _inputs(self, fed: Sequence[DraftRound]) -> list[SequenceInput]:
        if not fed:
            return []
        recurrences = [one for draft in fed for one in self._recurrences(draft)]
        rows = self._head.hints.beside(torch.cat([self._states[draft.key] for draft in fed]), recurrences)
        states = torch.split(rows, [draft.num_fed for draft in fed])
        return [replace(one, states=part) for one, part in zip(super()._inputs(fed), states, strict=True)]

    def _recurrences(self, draft: DraftRound) -> list[Recurrence]:
        """Of the tokens that the next forward feeds."""
        index, first = self._indices[draft.key], self._first_row(draft) + 1 + len(draft.token_ids)
        if draft.token_ids:
            index.append(draft.token_ids[-1])
        return index.recurrences[first : first + draft.num_fed]

    def _follow(self, draft: DraftRound) -> None:
        """The session's index has the committed tokens."""
        index, committed = self._indices.setdefault(draft.key, NgramIndex()), draft.item.committed_token_ids
        num_kept = common_prefix_len(index.token_ids, committed)
        index.truncate(num_kept)
        for token_id in committed[num_kept:]:
            index.append(token_id)

    def forget(self, session_key: SessionKey) -> None:
        super().forget(session_key)
        self._indices.pop(session_key, None)

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


def load_head(
    settings: ProposerSettings, proposer: str, build: Callable[[OverTarget], Head]
) -> tuple[TorchEngine, Head, ModelIdentity, Drafting]:
    """The head of --head over the target of --model, as a `HeadProposer` is made from; raises as `read_over_target`."""
    parts = read_over_target(settings)
    head = build(parts)
    need = HiddenStatesNeed(head.layers, head.config.hidden_size)
    identity = ModelIdentity(proposer, parts.name, parts.vocabulary.id_bytes_hash, need)
    return parts.engine_of(head), head, identity, parts.drafting
