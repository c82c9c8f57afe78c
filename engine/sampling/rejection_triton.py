"""The `rejection` policy for a ragged batch whose rows are on a GPU, in Triton; policies.py is its reference.

One program a request: it tests the drafts in order, then samples the recovered token at the first rejected row, or
the bonus token at the last one. The noise of ACCEPT, RESIDUAL and TARGET is made where it is used. Decisions equal
the reference's, given the same probabilities and the same noise (noise_triton.py). Run in Triton's interpreter
(TRITON_INTERPRET=1) and compiled for NVIDIA targets, so far on no GPU. Importing this needs Triton.

Letters: R requests, K drafts of a request, T rows (the sum of K+1), V vocabulary, N entries of all q.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl

from engine.sampling.gumbel import noise_key
from engine.sampling.noise_triton import BLOCK, row_argmax, signed, token_bits, uniform_from_bits
from engine.sampling.policies import Decision, VerifyRows, draft_q
from tandem.rng import Stream
from tandem.types import VerificationPolicy

_TARGET = tl.constexpr(int(Stream.TARGET))
_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_RESIDUAL = tl.constexpr(int(Stream.RESIDUAL))


@triton.jit
def _acceptance_uniform(
    seed: tl.tensor, sample_index: tl.tensor, committed_len: tl.tensor, index: tl.tensor
) -> tl.tensor:
    """Draft `index`'s draw of the ACCEPT stream, bound to the round: block 0, word 0."""
    word = _ACCEPT | (index + 1) << 8
    uniforms = uniform_from_bits(token_bits(seed, word, committed_len + index, sample_index, 0, 4))
    return tl.sum(tl.where(tl.arange(0, 4) == 0, uniforms, 0.0), 0)


@triton.jit
def _rejection_kernel(
    acceptance_ratios: tl.tensor,  # float64 [T]: p(d) / q(d) of the draft d that the row decides about
    log_residuals: tl.tensor,  # float64 [T, V]
    processed: tl.tensor,  # float32 [T, V]
    requests: tl.tensor,  # int64 [R, 5]: seed, sample index, committed length, first row, K
    decisions: tl.tensor,  # int64 [R, 2]: accepted drafts, next token
    vocab_size: tl.tensor,
    NUM_TOKENS: tl.constexpr,  # noqa: N803
) -> None:
    """One program a request."""
    request = requests + tl.program_id(0) * 5
    seed, sample_index, committed_len = tl.load(request), tl.load(request + 1), tl.load(request + 2)
    first_row, num_drafts = tl.load(request + 3), tl.load(request + 4)
    # 1. Drafts stand until the first that its draw rejects.
    num_accepted = num_drafts * 0
    stands = num_drafts > 0
    while stands:
        u = _acceptance_uniform(seed, sample_index, committed_len, num_accepted)
        stands = u < tl.load(acceptance_ratios + first_row + num_accepted)
        num_accepted += stands.to(tl.int64)
        stands = stands & (num_accepted < num_drafts)
    # 2. The token after them.
    place = (first_row + num_accepted) * vocab_size
    position = committed_len + num_accepted
    if num_accepted < num_drafts:
        token = row_argmax(log_residuals + place, seed, _RESIDUAL, position, sample_index, vocab_size, NUM_TOKENS)
    else:
        token = row_argmax(processed + place, seed, _TARGET, position, sample_index, vocab_size, NUM_TOKENS)
    tl.store(decisions + tl.program_id(0) * 2, num_accepted)
    tl.store(decisions + tl.program_id(0) * 2 + 1, token.to(tl.int64))


def verify_rejection(
    target_probs: torch.Tensor, processed: torch.Tensor, requests: Sequence[VerifyRows]
) -> list[Decision]:
    """Decide every request from its rows: probabilities float64 [T, V] and processed logits float32 [T, V].

    Proposals must have passed `check_proposal`. ValueError for a request of another policy, or unless T is the sum
    of the requests' rows.
    """
    for request in requests:
        if request.spec.effective_policy is not VerificationPolicy.REJECTION:
            raise ValueError(f"policy {request.spec.effective_policy.value!r} is not decided here")
    *first_rows, num_rows = accumulate((request.num_rows for request in requests), initial=0)
    if processed.shape[0] != num_rows:
        raise ValueError(f"{processed.shape[0]} rows for requests that own {num_rows}")
    if not requests:
        return []
    ratios, log_residuals = _ratios_and_residuals(target_probs, requests, first_rows)
    table = [_fields(request, first_row) for request, first_row in zip(requests, first_rows, strict=True)]
    fields = torch.tensor(table, dtype=torch.int64, device=processed.device)
    decisions = torch.empty(len(requests), 2, dtype=torch.int64, device=processed.device)
    launch = _rejection_kernel[(len(requests),)]
    rows = (ratios, log_residuals, processed.contiguous())
    launch(*rows, fields, decisions, processed.shape[1], BLOCK, enable_fp_fusion=False)
    return [Decision(num_accepted, token_id) for num_accepted, token_id in decisions.tolist()]


def _fields(request: VerifyRows, first_row: int) -> list[int]:
    key = noise_key(request.spec, Stream.TARGET, len(request.committed_token_ids))
    return [signed(key.seed), key.sample_index, key.position, first_row, request.num_rows - 1]


def _ratios_and_residuals(
    target_probs: torch.Tensor, requests: Sequence[VerifyRows], first_rows: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """p(d) / q(d) -> float64 [T], and log max(p - q, 0), or log p where nothing is left, -> float64 [T, V].

    The last row of a request has no draft: its ratio is 0 and its residual is p.
    """
    device = target_probs.device
    drafts = [
        (first_row + index, token_id, *draft_q(request, index))
        for request, first_row in zip(requests, first_rows, strict=True)
        for index, token_id in enumerate(request.proposal.draft_token_ids)
    ]
    ratios = torch.zeros(target_probs.shape[0], dtype=torch.float64, device=device)
    if not drafts:
        return ratios, target_probs.log()
    rows, token_ids, q_ids, q_probs = zip(*drafts, strict=True)
    at_draft = torch.tensor(rows, device=device), torch.tensor(token_ids, device=device)
    q_of_drafts = [float(probs[ids == token_id].sum()) for _, token_id, ids, probs in drafts]
    at_drafts = torch.tensor(q_of_drafts, dtype=torch.float64, device=device)
    ratios[at_draft[0]] = torch.where(at_drafts > 0.0, target_probs[at_draft] / at_drafts, 0.0)
    entry_rows = np.repeat(rows, [ids.size for ids in q_ids])
    at_entry = tuple(torch.from_numpy(index).to(device) for index in (entry_rows, np.concatenate(q_ids)))
    entries = torch.from_numpy(np.concatenate(q_probs)).to(device)
    residuals = target_probs.index_put(at_entry, -entries, accumulate=True).clamp_(min=0.0)
    is_left = residuals.any(dim=-1, keepdim=True)
    return ratios, torch.where(is_left, residuals, target_probs).log_()
