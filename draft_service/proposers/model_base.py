"""What proposers with a model of their own share: rows and memory, catching up, sampling as the target would, and one
step per draft position for a whole batch.

A session drafts from its model's rows. Each propose takes them back to what stands, shares out memory and the first
step (draft_room.py), then runs one forward per position for the sessions that still want a draft; none is computed for
one that does not.

Letters: K draft tokens of a session, A sessions whose next draft a forward decides, V vocabulary.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draft_service.proposers.base import (
    DraftKvUsage,
    HiddenStatesNeed,
    MissingHiddenStates,
    ProposeInput,
    ProposerCapabilities,
    SessionKey,
)
from draft_service.proposers.draft_kv import DraftKv
from draft_service.proposers.draft_room import plan_batch
from draft_service.proposers.draft_round import DraftRound
from draft_service.proposers.kind import ProposerSettings
from engine.backends.base import HiddenCapture, SequenceInput, SpeculativeEngine, require_speculation
from engine.sampling.draft_sampler import sample_drafts
from engine.sampling.processors import argmax_decides
from tandem.defaults import MAX_STEP_TOKENS
from tandem.types import DraftProbs, DraftProbsTransport, Proposal

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What the handshake says of the model."""

    proposer: str  # the name it is registered by
    model_id: str = ""
    vocab_hash: str = ""
    hidden_states: HiddenStatesNeed | None = None  # of the target


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a model drafts."""

    max_step_tokens: int = MAX_STEP_TOKENS  # of one forward
    min_confidence: float = 0.0  # a session's drafts end where no token is as likely as this
    clock: Callable[[], float] = time.monotonic  # seconds; tells which sessions are idle


def drafting_of(settings: ProposerSettings) -> Drafting:
    """As configured, of a proposer whose model was named; ValueError for a confidence that cannot be."""
    assert settings.engine is not None
    min_confidence = float(settings.options.min_confidence)
    if not 0.0 <= min_confidence < 1.0:
        raise ValueError(f"--min-confidence {min_confidence:g} is outside [0, 1)")
    return Drafting(settings.engine.max_step_tokens, min_confidence)


class ModelProposer:
    """Drafts with an engine that can truncate; what differs from model to model is overridden."""

    def __init__(
        self,
        engine: SpeculativeEngine,
        identity: ModelIdentity,
        drafting: Drafting = Drafting(),
        token_ids: torch.Tensor | None = None,
    ) -> None:
        """`token_ids`: int64 [U], ascending, the target's ids that the model's logits are of; None for 0 .. U - 1."""
        require_speculation(engine.capabilities)
        self.kv = DraftKv(engine, drafting.clock)
        self._engine = engine
        self._identity = identity
        self._drafting = drafting
        self._token_ids = token_ids
        self._num_shrunk = 0

    @property
    def capabilities(self) -> ProposerCapabilities:
        identity = self._identity
        return ProposerCapabilities(
            name=identity.proposer,
            graph_safe=False,
            transports=frozenset(DraftProbsTransport),
            model=self._engine.capabilities.model_info(identity.model_id, identity.vocab_hash),
            hidden_states=identity.hidden_states,
        )

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal | MissingHiddenStates | None]:
        """Roll back, share out memory, then one forward per draft position for the sessions that still want one.

        The first forward also feeds what sessions lack. One that lacks more than its share of the step is answered
        None, and lacks that much less the next time.
        """
        rounds = [DraftRound(item, self._num_wanted(item), self._tokens_of(item)) for item in batch]
        planned = plan_batch(self.kv, rounds, self._drafting.max_step_tokens)
        with torch.inference_mode():  # an engine's logits may be inference tensors, and sampling overwrites them
            lost = self._begin(planned)
            for key in lost:
                self.kv.release(key)
            planned = drafting = [draft for draft in planned if draft.key not in lost]
            behind = {draft.key for draft in drafting if draft.is_behind}
            while drafting:
                self._step(drafting)
                drafting = [draft for draft in drafting if draft.key not in behind and draft.wants_more]
        for draft in planned:
            self._finish(draft)
        unfinished = behind | lost
        self._num_shrunk += sum(draft.num_shrunk for draft in rounds if draft.key not in unfinished)
        return [
            MissingHiddenStates() if draft.key in lost else None if draft.key in behind else draft.proposal
            for draft in rounds
        ]

    def forget(self, session_key: SessionKey) -> None:
        """Free the session's rows."""
        self.kv.release(session_key)

    def kv_usage(self) -> DraftKvUsage:
        """The engine's blocks, and what their lack has cost."""
        return DraftKvUsage(self._engine.kv_usage(), self._num_shrunk)

    def _tokens_of(self, item: ProposeInput) -> Sequence[int]:
        """The tokens that rows stand for, at least one; the next draft follows the last, which has no row yet."""
        return item.committed_token_ids

    def _begin(self, planned: Sequence[DraftRound]) -> set[SessionKey]:  # noqa: ARG002 - for who reads more than tokens
        """Get ready what the first forward reads -> the sessions for which something is missing that was lost."""
        return set()

    def _inputs(self, fed: Sequence[DraftRound]) -> list[SequenceInput]:
        """Each round's part of the next forward."""
        return [
            SequenceInput(
                self.kv.sequence_id(draft.key), draft.pending[: draft.num_fed], 0 if draft.is_behind else 1
            )
            for draft in fed
        ]

    def _capture(self) -> HiddenCapture | None:
        """What the next forward has to keep."""
        return None

    def _took(self, fed: Sequence[DraftRound], capture: HiddenCapture | None) -> None:
        """A forward has been computed for these rounds."""

    def _finish(self, draft: DraftRound) -> None:
        """The round's drafts are made."""

    def _in_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """The model's logits [A, U] by the target's ids, float32 [A, V]: -inf for an id that is never drafted."""
        if self._token_ids is None:
            return logits
        everywhere = logits.new_full((len(logits), self._engine.capabilities.vocab_size), -torch.inf)
        everywhere[:, self._token_ids] = logits
        return everywhere

    def _token_id(self, index: int) -> int:
        """The target's id of the model's `index`; -1 for one that is never drafted."""
        return index if self._token_ids is None else int(self._token_ids[index])

    def _num_wanted(self, item: ProposeInput) -> int:
        """K, or less where the context ends: K drafts need K - 1 rows more than the tokens."""
        num_left = self._engine.capabilities.max_context - len(self._tokens_of(item))
        return max(0, min(item.num_draft_tokens, num_left + 1))

    def _step(self, drafting: list[DraftRound]) -> None:
        """One forward -> one more draft for each session that it brings up to date."""
        ready = [draft for draft in drafting if not draft.is_behind]
        fed = [draft for draft in drafting if draft.num_fed]
        capture = self._capture()
        drafted = self._forward(self._inputs(fed), ready, capture)
        self._took(fed, capture)
        for draft in drafting:
            self.kv.appended(draft.key, draft.take_fed())
        for draft, (token_id, draft_probs) in zip(ready, drafted, strict=True):
            if token_id < 0:
                draft.stop()
            else:
                draft.add(token_id, draft_probs)

    def _forward(
        self, inputs: list[SequenceInput], ready: list[DraftRound], capture: HiddenCapture | None
    ) -> list[tuple[int, DraftProbs | None]]:
        """One forward -> each ready session's next draft; -1 for none, as where logits are not finite."""
        if not ready:
            self._engine.advance(inputs, capture)
            return []
        min_confidence = self._drafting.min_confidence
        needs_logits = min_confidence > 0.0 or not all(
            argmax_decides(draft.item.spec, draft.next_row.output_len) for draft in ready
        )
        if needs_logits:
            logits = self._in_vocabulary(self._engine.forward_per_position_logits(inputs, capture))
            return _sample(logits, ready, min_confidence)
        # int64 [A]
        argmax: list[int] = self._engine.forward_per_position_argmax(inputs, capture).tolist()
        for draft, index in zip(ready, argmax, strict=True):
            if index < 0:
                _warn_not_finite(draft)
        return [(index if index < 0 else self._token_id(index), None) for index in argmax]


def _sample(
    logits: torch.Tensor, ready: list[DraftRound], min_confidence: float
) -> list[tuple[int, DraftProbs | None]]:
    """Raw logits [A, V] -> each session's next draft; -1 where they are not finite, or no token is likely enough."""
    is_finite: list[bool] = torch.isfinite(logits.amax(dim=-1)).tolist()
    rows = [draft.next_row for draft, is_good in zip(ready, is_finite, strict=True) if is_good]
    if len(rows) < len(ready):
        logits = logits[torch.tensor(is_finite)]
    sampled = zip(*sample_drafts(logits, rows, min_confidence), strict=True)
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
