"""The verification policies: how many drafts of a round stand, and which token follows them.

`greedy` and `coupled` accept a draft while it equals the token that plain decoding gives at its row, so their
output is plain decoding's own whatever the drafts are. `rejection` (rejection.py) and `block` (block.py) keep plain
decoding's distribution. The temperature decides, as everywhere: a greedy request is verified greedily under any name.

Letters: K drafts of a request, T rows of the batch (the sum of K+1), V vocabulary, M entries of q as it was sent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from engine.sampling.block import verify_block
from engine.sampling.gumbel import NoiseKey, noise_key, uniform
from engine.sampling.rejection import Q, acceptance_probability, one_hot_q, probabilities, sample_residual, sent_q
from engine.sampling.rows import Row
from engine.sampling.sampler import sample_row
from tandem.rng import Stream
from tandem.types import (
    MAX_SPARSE_ENTRIES,
    DraftProbs,
    DraftProbsTransport,
    ErrorCode,
    ItemError,
    Proposal,
    SessionSpec,
    VerificationPolicy,
)

_SUM_TOLERANCE = 1e-3  # of q as it was sent


@dataclass(frozen=True, slots=True)
class VerifyRows:
    """One request's part of a verification: K drafts own K+1 consecutive rows; none is plain decoding."""

    spec: SessionSpec
    committed_token_ids: Sequence[int]
    proposal: Proposal

    @property
    def num_rows(self) -> int:
        """K+1."""
        return len(self.proposal.draft_token_ids) + 1

    def row(self, index: int) -> Row:
        """Row `index` in 0..K: the drafts before it count as its past."""
        return Row(self.spec, self.committed_token_ids, self.proposal.draft_token_ids[:index])


@dataclass(frozen=True, slots=True)
class Decision:
    """The first `num_accepted` drafts stand, then comes the recovered or bonus token."""

    num_accepted: int
    next_token_id: int


def rows_of(requests: Sequence[VerifyRows]) -> list[Row]:
    """The T rows of a batch, in order: what `process` needs before `verify`."""
    return [request.row(index) for request in requests for index in range(request.num_rows)]


def verify(processed: torch.Tensor, requests: Sequence[VerifyRows]) -> list[Decision]:
    """Decide every request from its processed rows of float32 [T, V], each by its own policy.

    Proposals must have passed `check_proposal`. ValueError unless T is the sum of the requests' rows.
    """
    decisions = []
    for start, request in _starts(processed, requests):
        # [K+1, V]
        rows = processed[start : start + request.num_rows]
        decisions.append(_RULES[request.spec.effective_policy](rows, request))
    return decisions


def verify_argmax(argmax: torch.Tensor, requests: Sequence[VerifyRows]) -> list[Decision]:
    """`verify` for requests whose raw logits' argmax decides (`argmax_decides`), from int64 [T]."""
    token_ids = argmax.tolist()
    return [
        _leading_equal(request, token_ids[start : start + request.num_rows])
        for start, request in _starts(argmax, requests)
    ]


def check_proposal(spec: SessionSpec, proposal: Proposal, vocab_size: int) -> None:
    """Raise ItemError unless `verify` can decide about the proposal; the message names the field and the limit.

    UNIMPLEMENTED for a tree; INVALID_ARGUMENT for a draft outside the vocabulary and, where the session's policy
    reads draft_probs, for missing or malformed ones. Elsewhere draft_probs are ignored.
    """
    if proposal.parents:
        raise ItemError(ErrorCode.UNIMPLEMENTED, "proposal.parents: tree proposals are not offered; send a chain")
    for index, token_id in enumerate(proposal.draft_token_ids):
        if not 0 <= token_id < vocab_size:
            raise _invalid(f"draft_token_ids[{index}]", f"token id {token_id} is outside 0..{vocab_size - 1}")
    if not spec.uses_draft_probs:
        return
    num_drafts, num_probs = len(proposal.draft_token_ids), len(proposal.draft_probs)
    if num_probs != num_drafts:
        raise _invalid("draft_probs", f"{num_probs} entries for {num_drafts} drafts; one is needed for each")
    for index, draft_probs in enumerate(proposal.draft_probs):
        problem = _ids_problem(draft_probs, spec.draft_probs_transport, vocab_size) or _probs_problem(draft_probs)
        if problem:
            raise _invalid(f"draft_probs[{index}]", problem)


def _starts(rows: torch.Tensor, requests: Sequence[VerifyRows]) -> Iterator[tuple[int, VerifyRows]]:
    """Each request with the place of its first row."""
    num_rows = sum(request.num_rows for request in requests)
    if rows.shape[0] != num_rows:
        raise ValueError(f"{rows.shape[0]} rows for requests that own {num_rows}")
    start = 0
    for request in requests:
        yield start, request
        start += request.num_rows


def _accept_while_equal(processed: torch.Tensor, request: VerifyRows) -> Decision:
    """`greedy` and `coupled`: rows after the first difference are not even sampled."""
    for index, draft_token_id in enumerate(request.proposal.draft_token_ids):
        token_id = sample_row(processed[index], request.row(index))
        if token_id != draft_token_id:
            return Decision(index, token_id)
    return _bonus(processed, request)


def _leading_equal(request: VerifyRows, token_ids: Sequence[int]) -> Decision:
    """The same for tokens that are known already, one a row."""
    draft_token_ids = request.proposal.draft_token_ids
    num_accepted = 0
    while num_accepted < len(draft_token_ids) and draft_token_ids[num_accepted] == token_ids[num_accepted]:
        num_accepted += 1
    return Decision(num_accepted, token_ids[num_accepted])


def _reject_or_accept(processed: torch.Tensor, request: VerifyRows) -> Decision:
    """`rejection`: each draft by itself; rows after the first rejection are not looked at."""
    for index, draft_token_id in enumerate(request.proposal.draft_token_ids):
        p, q = probabilities(processed[index]), draft_q(request, index)
        if uniform(_acceptance_key(request, index)) >= acceptance_probability(p, q, draft_token_id):
            return Decision(index, sample_residual(p, q, _residual_key(request, index)))
    return _bonus(processed, request)


def _accept_block(processed: torch.Tensor, request: VerifyRows) -> Decision:
    """`block`: the longest prefix that the joint rule lets stand."""
    draft_token_ids = request.proposal.draft_token_ids
    num_drafts = len(draft_token_ids)
    p = [probabilities(processed[index]) for index in range(num_drafts)]
    q = [draft_q(request, index) for index in range(num_drafts)]
    uniforms = [uniform(_acceptance_key(request, index)) for index in range(num_drafts)]
    num_accepted, weight = verify_block(p, q, draft_token_ids, uniforms)
    if num_accepted == num_drafts:
        return _bonus(processed, request)
    key = _residual_key(request, num_accepted)
    return Decision(num_accepted, sample_residual(p[num_accepted], q[num_accepted], key, weight))


def _acceptance_key(request: VerifyRows, index: int) -> NoiseKey:
    """Noise that decides about draft `index`, bound to the round: a draw that is looked at is used up."""
    row = request.row(index)
    return noise_key(request.spec, Stream.ACCEPT, row.position, row.committed_len)


def _residual_key(request: VerifyRows, index: int) -> NoiseKey:
    """Noise of the recovered token at row `index`; a position has one, so it needs no round."""
    return noise_key(request.spec, Stream.RESIDUAL, request.row(index).position)


def draft_q(request: VerifyRows, index: int) -> Q:
    """What draft `index` was sampled from; one-hot when the proposer did not draw it from a distribution."""
    if request.spec.uses_draft_probs:
        return sent_q(request.proposal.draft_probs[index])
    return one_hot_q(request.proposal.draft_token_ids[index])


def _bonus(processed: torch.Tensor, request: VerifyRows) -> Decision:
    """Every draft stands: the last row is plain decoding."""
    num_accepted = len(request.proposal.draft_token_ids)
    return Decision(num_accepted, sample_row(processed[num_accepted], request.row(num_accepted)))


_RULES: Mapping[VerificationPolicy, Callable[[torch.Tensor, VerifyRows], Decision]] = MappingProxyType(
    {
        VerificationPolicy.GREEDY: _accept_while_equal,
        VerificationPolicy.COUPLED: _accept_while_equal,
        VerificationPolicy.REJECTION: _reject_or_accept,
        VerificationPolicy.BLOCK: _accept_block,
    }
)


def _invalid(field: str, problem: str) -> ItemError:
    return ItemError(ErrorCode.INVALID_ARGUMENT, f"proposal.{field}: {problem}")


def _ids_problem(draft_probs: DraftProbs, transport: DraftProbsTransport, vocab_size: int) -> str | None:
    """What is wrong with the ids [M] as this transport sends them; None when nothing is."""
    token_ids, num_probs = draft_probs.token_ids, draft_probs.probs.size
    if transport is DraftProbsTransport.FULL:
        if token_ids is None and 0 < num_probs <= vocab_size:
            return None
        return f"`full` needs 1..{vocab_size} probabilities and no ids; {num_probs} came"
    if token_ids is None or token_ids.size != num_probs or not 0 < num_probs <= MAX_SPARSE_ENTRIES:
        num_ids = 0 if token_ids is None else token_ids.size
        return f"{num_ids} ids and {num_probs} probabilities are not one and the same 1..{MAX_SPARSE_ENTRIES}"
    if int(token_ids.max()) >= vocab_size:
        return f"token id {int(token_ids.max())} is outside 0..{vocab_size - 1}"
    if np.unique(token_ids).size != token_ids.size:
        return "a token id comes twice"
    return None


def _probs_problem(draft_probs: DraftProbs) -> str | None:
    """What is wrong with the probabilities [M]; None when they are a distribution."""
    probs = draft_probs.probs.astype(np.float64)
    if not np.isfinite(probs).all() or probs.min() < 0.0:
        return "a probability is negative or not a number"
    if abs(probs.sum() - 1.0) > _SUM_TOLERANCE:
        return f"probabilities sum to {probs.sum():.6g}, not to 1 within {_SUM_TOLERANCE:g}"
    return None
