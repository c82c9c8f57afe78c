"""The randomised probability-integral transform: from emitted tokens to numbers that are uniform if all is well.

A token x that follows a history h gets
    U = F(x) + v p(x),   F(x) = sum of p over the tokens before x in some order,
where p is plain decoding's distribution after h and v is uniform on (0, 1) and independent of everything else. If x is
distributed as p, U is uniform on (0, 1) whatever h is and whatever order h has chosen; hence it is independent of h and
of every U before it, and the numbers of all answers, one after the other, are independent and uniform. That also holds
where an answer may end early: whether another token follows is decided before its number is drawn. So it holds for the
first N numbers of a fixed order of answers, N chosen beforehand.

The order of the tokens decides which errors add up from position to position and which cancel out (by id, all cancel):
- by p, largest first: a rule that favours or fails what the target likes shifts mass between the ends;
- by p / q, largest first, q being what the drafts are like there: a rule that favours or fails drafts does. The most
  common fault, one stream of noise for two purposes, is seen by this order only.
Tokens that are equal by p / q come by p, and by id where that is equal too.

Letters: N tokens of an answer, V vocabulary, O = 2 orders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.backends.base import SequenceInput, SpeculativeEngine
from engine.sampling.processors import process
from engine.sampling.rows import Row
from tandem.rng import F64
from tandem.types import SessionSpec
from tests.losslessness.answers import Answer

ORDERS = ("p", "p/q")
_WORKING_SET = 1 << 16  # logits at a time, so that all steps on them find them in the cache

LogQ = Callable[
    [Sequence[int], int], torch.Tensor
]  # tokens, N -> log q [N, V], up to a constant a row, before each of the last N


class ImpossibleTokenError(Exception):
    """A token was emitted to which plain decoding gives no chance; the message says where."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the answers are held against."""

    engine: SpeculativeEngine  # the target's model; deterministic, so its logits are those that the target had
    eos_token_ids: Sequence[int]
    log_q: LogQ  # of drafts; up to a constant


def uniforms(reference: Reference, answers: Sequence[Answer], num_tokens: int, seed: int) -> F64:
    """The numbers of the answers' first `num_tokens` tokens -> [O, num_tokens]; v is drawn from `seed`."""
    draws = np.random.default_rng(seed)
    numbers: list[F64] = []
    for answer in answers:
        spec, token_ids = answer.request.spec(reference.eos_token_ids), answer.result.token_ids
        processed = target_rows(reference.engine, spec, token_ids)
        log_q = reference.log_q((*spec.token_ids, *token_ids), len(token_ids))
        numbers.append(transform(processed, log_q, token_ids, draws.random(len(token_ids))))
    return np.concatenate(numbers, axis=1)[:, :num_tokens]


def target_rows(engine: SpeculativeEngine, spec: SessionSpec, token_ids: Sequence[int]) -> torch.Tensor:
    """Processed logits float32 [N, V] of plain decoding before each of an answer's tokens."""
    history = (*spec.token_ids, *token_ids)
    with torch.inference_mode():
        logits = raw_rows(engine, history, len(token_ids))
        rows = [Row(spec, history[: spec.prompt_len + index]) for index in range(len(token_ids))]
        return process(logits, rows)


def raw_rows(engine: SpeculativeEngine, token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
    """Logits float32 [num_rows, V] before each of the last `num_rows` tokens, which are fed as they are."""
    sequence_id = engine.create()
    try:
        return engine.forward_per_position_logits([SequenceInput(sequence_id, token_ids[:-1], num_rows)])
    finally:
        engine.release(sequence_id)


def transform(processed: torch.Tensor, log_q: torch.Tensor, token_ids: Sequence[int], draws: F64) -> F64:
    """U of N tokens in both orders [O, N] from processed logits [N, V], log q [N, V] and a uniform draw each.

    ImpossibleTokenError for a token that its row gives no probability.
    """
    # [N, 1]
    ids = torch.tensor(token_ids)[:, None]
    own = processed.gather(1, ids)
    if bool((own == -torch.inf).any()):
        index = int((own[:, 0] == -torch.inf).nonzero()[0])
        raise ImpossibleTokenError(f"token {token_ids[index]} at output index {index} has probability 0")
    num_at_once = max(1, _WORKING_SET // processed.shape[1])
    parts = zip(
        *(rows.split(num_at_once) for rows in (processed, log_q, ids, torch.from_numpy(draws))), strict=True
    )
    return np.concatenate([_transform_rows(*part).numpy() for part in parts], axis=1)


def _transform_rows(
    log_p: torch.Tensor, log_q: torch.Tensor, ids: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """U [O, N] from log p and log q [N, V], each up to a constant a row (no order knows constants), ids [N, 1], v [N].

    Where p is 0, p / q is 0 or not a number: it comes before nothing.
    """
    # [N, V]
    weights = (log_p - log_p.amax(dim=1, keepdim=True)).double().exp_()
    ratio = log_p - log_q
    own, own_ratio = log_p.gather(1, ids), ratio.gather(1, ids)
    is_before = (log_p > own) | ((log_p == own) & (torch.arange(log_p.shape[1]) < ids))
    is_before_by_ratio = (ratio > own_ratio) | (is_before & (ratio == own_ratio))
    # [O, N]
    before = torch.stack([weights.where(order, 0.0).sum(dim=1) for order in (is_before, is_before_by_ratio)])
    return (before + draws * weights.gather(1, ids)[:, 0]) / weights.sum(dim=1)
