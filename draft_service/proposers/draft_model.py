"""Proposer `draft_model`: a smaller model drafts, token by token, for the whole batch in lock-step.

It samples as the target would: the same processors with every parameter honoured, the same noise. So a target that
is its own draft agrees with itself in every position.

Letters: K draft tokens of a session, A sessions that still want drafts, V vocabulary.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from draft_service.proposers.base import DraftKvUsage, ProposeInput, ProposerCapabilities, SessionKey
from draft_service.proposers.draft_kv import DraftKv
from draft_service.proposers.draft_room import plan_batch
from draft_service.proposers.draft_round import DraftRound
from draft_service.proposers.kind import ProposerError, ProposerSettings
from engine.backends.base import SequenceInput, SpeculativeEngine, require_speculation
from engine.backends.registry import load_engine
from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.processors import argmax_decides
from tandem.defaults import MAX_STEP_TOKENS
from tandem.types import DraftProbs, DraftProbsTransport, Proposal

_log = logging.getLogger(__name__)


class DraftModelProposer:
    """Drafts with any engine that can truncate."""

    def __init__(
        self,
        engine: SpeculativeEngine,
        model_id: str = "",
        vocab_hash: str = "",
        max_step_tokens: int = MAX_STEP_TOKENS,
        num_token_ids: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_token_ids`: ids of the vocabulary, fewer than the engine's where its output head is padded.

        Padding is never drafted: the target's may be shorter, and refusing a sampled draft for its value would bias
        `rejection`. `clock` (seconds) tells which sessions are idle.
        """
        require_speculation(engine.capabilities)
        self.num_token_ids = num_token_ids or engine.capabilities.vocab_size
        self._engine = engine
        self._model_id = model_id
        self._vocab_hash = vocab_hash
        self._max_step_tokens = max_step_tokens
        self._num_shrunk = 0
        self.kv = DraftKv(engine, clock)

    @property
    def capabilities(self) -> ProposerCapabilities:
        return ProposerCapabilities(
            name="draft_model",
            graph_safe=False,
            transports=frozenset(DraftProbsTransport),
            model=self._engine.capabilities.model_info(self._model_id, self._vocab_hash),
        )

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal | None]:
        """Roll back, share out memory, then one forward per draft position for the sessions that still want one.

        The first forward also feeds what sessions lack. One that lacks more than its share of the step is answered
        None, and lacks that much less the next time.
        """
        rounds = [DraftRound(item, self._num_wanted(item)) for item in batch]
        drafting = plan_batch(self.kv, rounds, self._max_step_tokens)
        behind = {draft.key for draft in drafting if draft.is_behind}
        with torch.inference_mode():  # an engine's logits may be inference tensors, and sampling overwrites them
            while drafting:
                self._step(drafting)
                drafting = [draft for draft in drafting if draft.key not in behind and draft.wants_more]
        self._num_shrunk += sum(draft.num_shrunk for draft in rounds if draft.key not in behind)
        return [None if draft.key in behind else draft.proposal for draft in rounds]

    def forget(self, session_key: SessionKey) -> None:
        """Free the session's rows."""
        self.kv.release(session_key)

    def kv_usage(self) -> DraftKvUsage:
        """The engine's blocks, and what their lack has cost."""
        return DraftKvUsage(self._engine.kv_usage(), self._num_shrunk)

    def _num_wanted(self, item: ProposeInput) -> int:
        """K, or less where the context ends: K drafts need committed_len + K - 1 rows."""
        num_left = self._engine.capabilities.max_context - len(item.committed_token_ids)
        return max(0, min(item.num_draft_tokens, num_left + 1))

    def _step(self, drafting: list[DraftRound]) -> None:
        """One forward -> one more draft for each session that it brings up to date."""
        ready = [draft for draft in drafting if not draft.is_behind]
        inputs = [
            SequenceInput(
                self.kv.sequence_id(draft.key), draft.pending[: draft.num_fed], 0 if draft.is_behind else 1
            )
            for draft in drafting
            if draft.num_fed
        ]
        drafted = self._forward(inputs, ready)
        for draft in drafting:
            self.kv.appended(draft.key, draft.take_fed())
        for draft, (token_id, draft_probs) in zip(ready, drafted, strict=True):
            if token_id < 0:
                draft.stop()
            else:
                draft.add(token_id, draft_probs)

    def _forward(self, inputs: list[SequenceInput], ready: list[DraftRound]) -> list[tuple[int, DraftProbs | None]]:
        """One forward -> each ready session's next draft; -1 for padding, and where logits are not finite."""
        if not ready:
            self._engine.advance(inputs)
            return []
        if not all(argmax_decides(draft.item.spec, draft.next_row.output_len) for draft in ready):
            # [A, V]
            logits = self._engine.forward_per_position_logits(inputs)[:, : self.num_token_ids]
            return _sample(logits, ready)
        # int64 [A]
        argmax: list[int] = self._engine.forward_per_position_argmax(inputs).tolist()
        for draft, token_id in zip(ready, argmax, strict=True):
            if token_id < 0:
                _warn_not_finite(draft)
        return [(token_id if token_id < self.num_token_ids else -1, None) for token_id in argmax]


def _sample(logits: torch.Tensor, ready: list[DraftRound]) -> list[tuple[int, DraftProbs | None]]:
    """Raw logits [A, V] -> each session's next draft; -1 where they are not finite."""
    is_finite: list[bool] = torch.isfinite(logits.amax(dim=-1)).tolist()
    rows = [draft.next_row for draft, is_good in zip(ready, is_finite, strict=True) if is_good]
    if len(rows) < len(ready):
        logits = logits[torch.tensor(is_finite)]
    sampled = zip(*sample_drafts(logits, rows), strict=True)
    drafted: list[tuple[int, DraftProbs | None]] = []
    for draft, is_good in zip(ready, is_finite, strict=True):
        if is_good:
            drafted.append(next(sampled))
        else:
            _warn_not_finite(draft)
            drafted.append((-1, None))
    return drafted


def _warn_not_finite(draft: DraftRound) -> None:
    _log.warning("drafting stops at %d tokens: the logits are not finite", draft.next_row.position)


def load_draft_model(settings: ProposerSettings) -> DraftModelProposer:
    """Load the model that was named; ProposerError without one, ValueError when it cannot serve the limits."""
    if settings.engine is None:
        raise ProposerError("needs a model: name one with --model (for `tandem up`: --draft-model)")
    settings.limits.check_step(settings.engine.max_step_tokens)
    loaded = load_engine(settings.engine)
    settings.limits.check_memory(loaded.engine.kv_usage())
    return DraftModelProposer(
        loaded.engine,
        loaded.model_id,
        loaded.vocabulary.id_bytes_hash,
        settings.engine.max_step_tokens,
        loaded.vocabulary.vocab_size,
    )
