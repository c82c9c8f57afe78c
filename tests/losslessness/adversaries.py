"""Proposers that draft as badly as honesty allows: what q they name is what they draw from, but q is nothing like p.

Letters: V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from draft_service.proposers.base import DraftKvUsage, ProposeInput, ProposerCapabilities, SessionKey
from engine.sampling.draft_sampler import draft_key
from engine.sampling.gumbel import gumbel_argmax
from engine.sampling.rows import Row
from tandem.rng import F64
from tandem.types import DraftProbs, DraftProbsTransport, ModelInfo, Proposal
from tests.losslessness import toy_model

QOf = Callable[[Sequence[int]], F64]  # tokens so far -> q [V]


def reversed_ranking(token_ids: Sequence[int]) -> F64:
    """The target's own probabilities, the largest given to its least likely token."""
    probs = np.exp(toy_model.target_logits(token_ids).astype(np.float64))
    order = np.argsort(probs)
    q = np.empty_like(probs)
    q[order] = probs[order[::-1]]
    return np.asarray(q / q.sum())


def always(token_id: int) -> QOf:
    """One token, whatever came before."""
    q = np.zeros(toy_model.VOCAB)
    q[token_id] = 1.0
    return lambda _: q


def any_token(token_ids: Sequence[int]) -> F64:
    """Every token alike."""
    return np.full(toy_model.VOCAB, 1 / toy_model.VOCAB)


def often_eos(token_ids: Sequence[int]) -> F64:
    """The end half of the time, else any token: a draft that does not know of min_tokens."""
    return np.asarray((any_token(token_ids) + always(toy_model.EOS)(token_ids)) / 2)


ADVERSARIES: Mapping[str, QOf] = MappingProxyType(
    {
        "reversed": reversed_ranking,
        "constant": always(5),
        "eos": always(toy_model.EOS),
        "random": any_token,
        "often EOS": often_eos,
    }
)


class Adversary:
    """Draws from `q_of` with noise of the draft's own and sends q as the session's transport wants it."""

    def __init__(self, q_of: QOf) -> None:
        self._q_of = q_of

    @property
    def capabilities(self) -> ProposerCapabilities:
        return ProposerCapabilities(
            name="adversary",
            graph_safe=False,
            transports=frozenset(DraftProbsTransport),
            model=ModelInfo(vocab_size=toy_model.VOCAB),  # `full` is served where the size of q is known
        )

    def propose(self, batch: Sequence[ProposeInput]) -> list[Proposal]:
        """As many drafts as are wanted."""
        return [self._propose(item) for item in batch]

    def forget(self, session_key: SessionKey) -> None:
        """Nothing is kept."""

    def kv_usage(self) -> DraftKvUsage | None:
        """No model, no memory."""
        return None

    def _propose(self, item: ProposeInput) -> Proposal:
        token_ids: list[int] = []
        sent: list[DraftProbs] = []
        for _ in range(item.num_draft_tokens):
            q = self._q_of((*item.committed_token_ids, *token_ids)).astype(np.float32)
            row = Row(item.spec, item.committed_token_ids, tuple(token_ids))
            token_ids.append(_draw(q.astype(np.float64), row))
            sent.append(_as_sent(q, item.spec.draft_probs_transport))
        return Proposal(tuple(token_ids), tuple(sent) if item.spec.uses_draft_probs else ())


def _draw(q: F64, row: Row) -> int:
    with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf: never drawn
        scores = np.log(q)
    return gumbel_argmax(scores, draft_key(row))


def _as_sent(q: np.ndarray[tuple[int], np.dtype[np.float32]], transport: DraftProbsTransport) -> DraftProbs:
    if transport is DraftProbsTransport.FULL:
        return DraftProbs(None, q)
    token_ids = np.flatnonzero(q)
    return DraftProbs(token_ids.astype(np.uint32), q[token_ids])
