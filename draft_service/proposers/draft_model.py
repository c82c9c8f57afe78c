"""Proposer `draft_model`: a smaller model drafts, token by token, for the whole batch in lock-step.

It samples as the target would: the same processors with every parameter honoured, the same noise. So a target that
is its own draft agrees with itself in every position.

Letters: K draft tokens of a session, A sessions that still want drafts, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from draft_service.proposers.base import ProposeInput, ProposerCapabilities, SessionKey
from draft_service.proposers.draft_kv import DraftKv
from draft_service.proposers.kind import ProposerError, ProposerSettings
from engine.backends.base import (
    KvUsage,
    OutOfBlocksError,
    SequenceInput,
    SpeculativeEngine,
    require_speculation,
)
from engine.backends.registry import load_engine
from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.processors import argmax_decides
from engine.sampling.rows import Row
from tandem.defaults import MAX_STEP_TOKENS
from tandem.types import DraftProbs, DraftProbsTransport, Proposal

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class _Draft:
    """One session's draft while it grows."""

    item: ProposeInput
    num_wanted: int
    pending: list[int] = field(default_factory=list)  # tokens that have no row yet and are fed next
    token_ids: list[int] = field(default_factory=list)
    draft_probs: list[DraftProbs] = field(default_factory=list)

    @property
    def key(self) -> SessionKey:
        return self.item.session_key

    @property
    def wants_more(self) -> bool:
        """Not after an ending id: whatever came then would never be used."""
        has_ended = bool(self.token_ids) and self.token_ids[-1] in self.item.spec.ending_token_ids
        return len(self.token_ids) < self.num_wanted and not has_ended

    @property
    def next_row(self) -> Row:
        """What the next draft is decided for."""
        return Row(self.item.spec, self.item.committed_token_ids, tuple(self.token_ids))

    def add(self, token_id: int, draft_probs: DraftProbs | None) -> None:
        """Append a draft, which is what the next forward feeds."""
        self.token_ids.append(token_id)
        self.pending = [token_id]
        if draft_probs is not None:
            self.draft_probs.append(draft_probs)


class DraftModelProposer:
    """Drafts with any engine that can truncate."""

    def __init__(
        self,
        engine: SpeculativeEngine,
        model_id: str = "",
        vocab_hash: str = "",
        max_step_tokens: int = MAX_STEP_TOKENS,
        num_token_ids: int | None = None,
    ) -> None:
        """`num_token_ids`: ids of the vocabulary, fewer than the engine's where its output head is padded.

        Padding is never drafted: the target's may be shorter, and refusing a sampled draft for its value would bias
        `rejection`.
        """
        require_speculation(engine.capabilities)
        self.num_token_ids = num_token_ids or engine.capabilities.vocab_size
        self._engine = engine
        self._model_id = model_id
        self._vocab_hash = vocab_hash
        self._max_step_tokens = max_step_tokens
        usage = engine.kv_usage()
        self._max_rows = min(engine.capabilities.max_context, usage.total_blocks * usage.block_size)
        self.kv = DraftKv(engine)

    @property
    def capabilities(self) -> ProposerCapabilities:
        return ProposerCapabilities(
            name="draft_model",
            graph_safe=False,
            needs_hidden_states=False,
            transports=frozenset(DraftProbsTransport),
            model=self._engine.capabilities.model_info(self._model_id, self._vocab_hash),
        )

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal]:
        """Roll back, catch up, then one forward per draft position for the sessions that still want one."""
        drafts = [_Draft(item, self._num_wanted(item)) for item in batch]
        protected = {draft.key for draft in drafts}
        active = [draft for draft in drafts if draft.wants_more]
        for draft in active:
            draft.pending = self.kv.roll_back(draft.key, draft.item.committed_token_ids)
        with torch.inference_mode():  # an engine's logits may be inference tensors, and sampling overwrites them
            self._catch_up(active, protected)
            while active:
                self._draft_one(active, protected)
                active = [draft for draft in active if draft.wants_more]
        return [Proposal(tuple(draft.token_ids), tuple(draft.draft_probs)) for draft in drafts]

    def forget(self, session_key: SessionKey) -> None:
        """Free the session's rows."""
        self.kv.release(session_key)

    def kv_usage(self) -> KvUsage:
        """The engine's."""
        return self._engine.kv_usage()

    def _num_wanted(self, item: ProposeInput) -> int:
        """K, or less where context or pool end: K drafts need committed_len + K - 1 rows."""
        return min(item.num_draft_tokens, self._max_rows - len(item.committed_token_ids) + 1)

    def _catch_up(self, active: list[_Draft], protected: set[SessionKey]) -> None:
        """Feed what is missing, chunk by chunk, until the rest of all sessions fits into one step."""
        while sum(len(draft.pending) for draft in active) > max(self._max_step_tokens, len(active)):
            room = self._max_step_tokens
            chunks: dict[SessionKey, int] = {}
            for draft in active:
                chunks[draft.key] = min(len(draft.pending) - 1, room)
                room -= chunks[draft.key]
            self._step(active, protected, chunks, 0, self._engine.advance)

    def _draft_one(self, active: list[_Draft], protected: set[SessionKey]) -> None:
        """One forward -> one more draft for each active session; those that find no memory leave `active`."""
        chunks = {draft.key: len(draft.pending) for draft in active}
        draft_probs: list[DraftProbs | None]
        if all(argmax_decides(draft.item.spec, draft.next_row.output_len) for draft in active):
            # int64 [A]
            argmax = self._step(active, protected, chunks, 1, self._engine.forward_per_position_argmax)
            token_ids = [] if argmax is None else argmax.tolist()
            token_ids = [token_id if token_id < self.num_token_ids else -1 for token_id in token_ids]
            draft_probs = [None] * len(token_ids)
        else:
            # [A, V]
            logits = self._step(active, protected, chunks, 1, self._engine.forward_per_position_logits)
            rows = [draft.next_row for draft in active]
            token_ids, draft_probs = (
                ([], []) if logits is None else sample_drafts(logits[:, : self.num_token_ids], rows)
            )
        for draft, token_id, probs in zip(active, token_ids, draft_probs, strict=True):
            if token_id < 0:  # nothing to draft: padding, or logits that are not finite
                draft.num_wanted = len(draft.token_ids)
            else:
                draft.add(token_id, probs)

    def _step(
        self,
        active: list[_Draft],
        protected: set[SessionKey],
        chunks: Mapping[SessionKey, int],
        num_logits_rows: int,
        forward: Callable[[list[SequenceInput]], ResultT],
    ) -> ResultT | None:
        """Feed each active session the next `chunks[key]` pending tokens in one forward; None: nobody is left.

        Out of blocks: first sessions outside the batch lose their rows, then the last active session gives up for
        this round and leaves `active`, its rows freed for the others.
        """
        while inputs := [
            SequenceInput(self.kv.sequence_id(draft.key), draft.pending[: chunks[draft.key]], num_logits_rows)
            for draft in active
            if chunks[draft.key]
        ]:
            try:
                result = forward(inputs)
            except OutOfBlocksError:
                if not self.kv.evict_one(protected):
                    victim = active.pop()
                    victim.num_wanted = len(victim.token_ids)
                    self.kv.release(victim.key)
                continue
            for draft in active:
                fed = draft.pending[: chunks[draft.key]]
                self.kv.appended(draft.key, fed)
                del draft.pending[: len(fed)]
            return result
        return None


def load_draft_model(settings: ProposerSettings) -> DraftModelProposer:
    """Load the model that was named; ProposerError without one, and when a step has no room for every session."""
    if settings.engine is None:
        raise ProposerError("needs a model: name one with --model")
    if settings.max_sessions > settings.engine.max_step_tokens:
        raise ProposerError(
            f"max_sessions {settings.max_sessions} is more than max_step_tokens {settings.engine.max_step_tokens}, "
            "and a step drafts a token for every session"
        )
    loaded = load_engine(settings.engine)
    return DraftModelProposer(
        loaded.engine,
        loaded.model_id,
        loaded.vocabulary.id_bytes_hash,
        settings.engine.max_step_tokens,
        loaded.vocabulary.vocab_size,
    )
