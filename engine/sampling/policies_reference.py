"""The policies as the textbook states them: one loop a request, whole-vocabulary arrays, every draw in full.

Only tests use it, as the naive version of policies.py, rejection.py and gumbel.py.
"""

import numpy as np

from engine.sampling.policies import Decision, VerifyRows
from tandem import rng
from tandem.rng import F32, F64, Stream
from tandem.types import DraftProbsTransport, VerificationPolicy


def verify_request(processed: F32, request: VerifyRows) -> Decision:
    """Decide one request from its processed rows [K+1, V]."""
    if request.spec.sampling.is_greedy:
        return _greedy(processed, request)
    if request.spec.verification_policy is VerificationPolicy.REJECTION:
        return _rejection(processed, request)
    return _coupled(processed, request)


def _greedy(processed: F32, request: VerifyRows) -> Decision:
    drafts = request.proposal.draft_token_ids
    for k, draft in enumerate(drafts):
        if draft != np.argmax(processed[k]):
            return Decision(k, int(np.argmax(processed[k])))
    return Decision(len(drafts), int(np.argmax(processed[len(drafts)])))


def _coupled(processed: F32, request: VerifyRows) -> Decision:
    drafts = request.proposal.draft_token_ids
    for k, draft in enumerate(drafts):
        token = _sample_target(processed[k], request, k)
        if draft != token:
            return Decision(k, token)
    return Decision(len(drafts), _sample_target(processed[len(drafts)], request, len(drafts)))


def _rejection(processed: F32, request: VerifyRows) -> Decision:
    seed, index = _seed(request), request.spec.sample_index
    committed_len = len(request.committed_token_ids)
    drafts = request.proposal.draft_token_ids
    for k, draft in enumerate(drafts):
        position = committed_len + k
        p, q = _softmax(processed[k]), _full_q(request, k, processed.shape[1])
        u = rng.uniform(seed, rng.stream_word(Stream.ACCEPT, position, committed_len), position, index)
        if q[draft] > 0 and u < p[draft] / q[draft]:
            continue
        rest = np.maximum(p - q, 0.0)
        if not rest.any():
            rest = p
        with np.errstate(divide="ignore"):
            scores = np.log(rest)
        word = rng.stream_word(Stream.RESIDUAL, position)
        noise = rng.gumbel(seed, word, position, processed.shape[1], index)
        return Decision(k, int(np.argmax(scores + noise)))
    return Decision(len(drafts), _sample_target(processed[len(drafts)], request, len(drafts)))


def _sample_target(row: F32, request: VerifyRows, k: int) -> int:
    """argmax(processed logits + Gumbel(TARGET, position)) over the row [V]."""
    position = len(request.committed_token_ids) + k
    word = rng.stream_word(Stream.TARGET, position)
    noise = rng.gumbel(_seed(request), word, position, row.shape[0], request.spec.sample_index)
    return int(np.argmax(row + noise))


def _softmax(row: F32) -> F64:
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    return np.asarray(weights / weights.sum())


def _full_q(request: VerifyRows, k: int, vocab_size: int) -> F64:
    """q of draft k -> [V]."""
    q = np.zeros(vocab_size)
    if request.spec.draft_probs_transport is DraftProbsTransport.SPARSE:
        entry = request.proposal.draft_probs[k]
        q[entry.token_ids] = entry.probs.astype(np.float64) / entry.probs.astype(np.float64).sum()
    else:
        q[request.proposal.draft_token_ids[k]] = 1.0
    return q


def _seed(request: VerifyRows) -> int:
    seed = request.spec.sampling.seed
    assert seed is not None
    return seed
