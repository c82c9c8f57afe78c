"""The policies as the textbook states them: one loop a request, whole-vocabulary arrays, every draw in full.

Only tests use it, as the naive version of policies.py, rejection.py and gumbel.py.
"""

import numpy as np

from engine.sampling.policies import Decision, VerifyRows
from tandem import rng
from tandem.rng import F32, F64, Stream
from tandem.types import VerificationPolicy


def verify_request(processed: F32, request: VerifyRows) -> Decision:
    """Decide one request from its processed rows [K+1, V]."""
    if request.spec.sampling.is_greedy:
        return _greedy(processed, request)
    if request.spec.verification_policy is VerificationPolicy.REJECTION:
        return _rejection(processed, request)
    if request.spec.verification_policy is VerificationPolicy.BLOCK:
        return _block(processed, request)
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
    drafts = request.proposal.draft_token_ids
    for k, draft in enumerate(drafts):
        p, q = _softmax(processed[k]), _full_q(request, k, processed.shape[1])
        if q[draft] > 0 and _acceptance_uniform(request, k) < p[draft] / q[draft]:
            continue
        return Decision(k, _recovered(np.maximum(p - q, 0.0), p, request, k))
    return Decision(len(drafts), _sample_target(processed[len(drafts)], request, len(drafts)))


def _block(processed: F32, request: VerifyRows) -> Decision:
    """Algorithm 2 of arXiv 2403.10444 with its own names: tau drafts stand, w is the paper's p_i, h its h_i."""
    drafts, vocab_size = request.proposal.draft_token_ids, processed.shape[1]
    p = [_softmax(row) for row in processed]
    q = [_full_q(request, k, vocab_size) for k in range(len(drafts))]
    tau, w, w_tau = 0, 1.0, 1.0
    for i in range(1, len(drafts) + 1):
        draft = drafts[i - 1]
        w = min(w * p[i - 1][draft] / q[i - 1][draft], 1.0) if q[i - 1][draft] > 0 else 0.0
        h = w
        if i < len(drafts):
            rest = np.maximum(w * p[i] - q[i], 0.0).sum()
            # 0 / 0 when w = 1 and p = q: the limit from p near q is 1.
            h = 1.0 if w == 1.0 else rest / (rest + 1.0 - w)
        if _acceptance_uniform(request, i - 1) <= h:
            tau, w_tau = i, w
    if tau == len(drafts):
        return Decision(tau, _sample_target(processed[tau], request, tau))
    return Decision(tau, _recovered(np.maximum(w_tau * p[tau] - q[tau], 0.0), p[tau], request, tau))


def _acceptance_uniform(request: VerifyRows, k: int) -> float:
    """u of draft k."""
    committed_len = len(request.committed_token_ids)
    word = rng.stream_word(Stream.ACCEPT, committed_len + k, committed_len)
    return rng.uniform(_seed(request), word, committed_len + k, request.spec.sample_index)


def _recovered(rest: F64, p: F64, request: VerifyRows, k: int) -> int:
    """argmax(log rest + Gumbel(RESIDUAL, position)), of p where nothing is left."""
    position = len(request.committed_token_ids) + k
    with np.errstate(divide="ignore"):
        scores = np.log(rest if rest.any() else p)
    word = rng.stream_word(Stream.RESIDUAL, position)
    return int(np.argmax(scores + rng.gumbel(_seed(request), word, position, p.size, request.spec.sample_index)))


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
    if not request.spec.draft_probs_transport.carries_probs:
        q[request.proposal.draft_token_ids[k]] = 1.0
        return q
    entry = request.proposal.draft_probs[k]
    q[range(entry.probs.size) if entry.token_ids is None else entry.token_ids] = entry.probs
    return np.asarray(q / q.sum())


def _seed(request: VerifyRows) -> int:
    seed = request.spec.sampling.seed
    assert seed is not None
    return seed
