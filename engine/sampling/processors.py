"""From raw logits to the distribution a request asked for: one function for draft, target and plain decoding.

Every row is processed by itself, so that its result cannot depend on the rows beside it, bit for bit: no
reduction crosses rows, and sums of probabilities are float64.

Letters: R rows, V vocabulary.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from engine.sampling.likeliest import MASKED, by_logit, likeliest, positions
from engine.sampling.rows import Row
from tandem.types import SamplingParams, SessionSpec

Ids = npt.NDArray[np.int64]

_LIKELY = 1e-5  # the thousands of tokens above it mostly have top_p together


def process(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Raw logits float32 [R, V] of `rows` -> processed logits float32 [R, V]; overwrites `logits`.

    Softmax of a processed row is the distribution to sample from; a masked token is -inf, and at least one
    token never is. In order: logit_bias, penalties, allowed and bad tokens, min_tokens, temperature, top_k,
    top_p, min_p. A greedy row ends after min_tokens: the rest cannot change its argmax. An id the model has no
    logit for (a padding-only difference between vocabularies) is skipped. A mask that would leave no token at
    all is not applied. ValueError unless there is one `Row` a row.
    """
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows")
    requests = _Requests()
    for index, row in enumerate(rows):
        _process_row(logits[index], row, requests)
    return logits


def needs_no_logits(spec: SessionSpec, output_len: int) -> bool:
    """Whether argmax of the raw logits is all that a verdict needs from `output_len` output tokens on."""
    return spec.logprobs is None and argmax_decides(spec, output_len)


def argmax_decides(spec: SessionSpec, output_len: int) -> bool:
    """Whether argmax of the raw logits is the token of every row from `output_len` output tokens on."""
    sampling = spec.sampling
    return (
        sampling.is_greedy
        and not sampling.logit_bias
        and not sampling.allowed_token_ids
        and not sampling.bad_token_ids
        and not _has_penalties(sampling)
        and (output_len >= spec.min_tokens or not spec.ending_token_ids)
    )


class _Requests:
    """What the rows of one request share, made once a step: rows hold one and the same objects of their request."""

    def __init__(self) -> None:
        self._histories: dict[tuple[int, int], _History] = {}
        self._forbidden: dict[int, torch.Tensor] = {}

    def history(self, row: Row) -> "_History":
        """The request's committed tokens."""
        key = id(row.committed_token_ids), row.spec.prompt_len
        if key not in self._histories:
            self._histories[key] = _History(row)
        return self._histories[key]

    def forbidden(self, allowed_token_ids: tuple[int, ...], logits: torch.Tensor) -> torch.Tensor:
        """Every id but the allowed ones, as an index int64 [N]."""
        key = id(allowed_token_ids)
        if key not in self._forbidden:
            others = torch.ones_like(logits, dtype=torch.bool)
            others[_ids(allowed_token_ids, logits)] = False
            self._forbidden[key] = others.nonzero()[:, 0]
        return self._forbidden[key]


class _History:
    """The tokens of one request's committed prefix, brought together once for all its rows."""

    def __init__(self, row: Row) -> None:
        self._committed: Ids = np.array(row.committed_token_ids, dtype=np.int64)
        self._output = self._committed[row.spec.prompt_len :]

    def seen(self, row: Row) -> Ids:
        """Every token of prompt and output before the row, as often as it came."""
        return _with_drafts(self._committed, row)

    def output_counts(self, row: Row) -> tuple[Ids, Ids]:
        """Each output token before the row, and how often it came."""
        return np.unique(_with_drafts(self._output, row), return_counts=True)


def _with_drafts(token_ids: Ids, row: Row) -> Ids:
    return np.concatenate((token_ids, np.array(row.draft_token_ids, dtype=np.int64)))


def _process_row(logits: torch.Tensor, row: Row, requests: _Requests) -> None:
    """All processors on one row [V], in place."""
    sampling, spec = row.spec.sampling, row.spec
    if sampling.logit_bias:
        _add(logits, list(sampling.logit_bias), list(sampling.logit_bias.values()))
    if _has_penalties(sampling):
        _penalise(logits, row, requests.history(row))
    if sampling.allowed_token_ids:
        _mask(logits, requests.forbidden(sampling.allowed_token_ids, logits))
    if sampling.bad_token_ids:
        _mask(logits, _ids(sampling.bad_token_ids, logits))
    if row.output_len < spec.min_tokens and spec.ending_token_ids:
        _mask(logits, _ids(sorted(spec.ending_token_ids), logits))
    if sampling.is_greedy:
        return
    if sampling.temperature != 1.0:
        # The largest becomes 0, so that the smallest temperature overflows to -inf only.
        logits.sub_(logits.max()).div_(sampling.temperature)
    kept = _first_of(logits, sampling)
    if kept is not None:
        _keep(logits, kept)
    if sampling.min_p > 0.0:
        _keep_min_p(logits, sampling.min_p)


def _has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    )


def _ids(token_ids: npt.ArrayLike, logits: torch.Tensor) -> torch.Tensor:
    """The ids that the row has, as an index int64 [N]."""
    ids: Ids = np.asarray(token_ids, dtype=np.int64)
    return torch.from_numpy(ids[ids < logits.shape[0]]).to(logits.device)


def _add(logits: torch.Tensor, token_ids: npt.ArrayLike, amounts: npt.ArrayLike) -> None:
    """Add an amount to each token's logit."""
    values = np.asarray(amounts, dtype=np.float32)[np.asarray(token_ids) < logits.shape[0]]
    logits[_ids(token_ids, logits)] += torch.from_numpy(values).to(logits.device)


def _penalise(logits: torch.Tensor, row: Row, history: _History) -> None:
    """Repetition scales prompt and output tokens towards "unlikely"; presence and frequency lower output tokens."""
    sampling = row.spec.sampling
    if sampling.repetition_penalty != 1.0:
        index = _ids(history.seen(row), logits)
        seen = logits[index]
        penalty = sampling.repetition_penalty
        # A token that came twice is written twice, with one and the same value.
        logits[index] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        token_ids, counts = history.output_counts(row)
        _add(logits, token_ids, -(sampling.presence_penalty + sampling.frequency_penalty * counts))


def _mask(logits: torch.Tensor, index: torch.Tensor) -> None:
    """Mask these tokens, unless nothing would be left."""
    before = logits[index]
    logits[index] = MASKED
    if logits.max() == MASKED:
        logits[index] = before


def _first_of(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor | None:
    """The ids that top_k and top_p keep, by (logit descending, id ascending); None for all."""
    if 0 < sampling.top_k < logits.shape[0]:
        token_ids = likeliest(logits, sampling.top_k)
        cumulative = torch.softmax(logits[token_ids].double(), dim=0).cumsum(dim=0)
    elif sampling.top_p < 1.0:
        token_ids, cumulative = _first_with(logits, sampling.top_p)
    else:
        return None
    # A token stays while those before it have less than top_p; the first always does.
    return token_ids if sampling.top_p >= 1.0 else token_ids[: int((cumulative < sampling.top_p).sum()) + 1]


def _first_with(logits: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Enough of the ids, by (logit descending, id ascending), to have `top_p` together; their summed probabilities."""
    # [V]
    probs = torch.softmax(logits.double(), dim=0)
    # What the second floor leaves out has less than half of 1 - top_p; the last is for rounding.
    for floor in (_LIKELY, (1.0 - top_p) / (2 * logits.shape[0]), 0.0):
        token_ids = by_logit(logits, positions(probs > floor))
        cumulative = probs[token_ids].cumsum(dim=0)
        if token_ids.numel() and cumulative[-1] >= top_p:
            break
    return token_ids, cumulative


def _keep(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Mask all other tokens."""
    values = logits[token_ids]
    logits.fill_(MASKED)
    logits[token_ids] = values


def _keep_min_p(logits: torch.Tensor, min_p: float) -> None:
    """Mask what has less than min_p times the largest probability."""
    floor = np.float32(float(logits.max()) + math.log(min_p))
    F.threshold(logits, float(np.nextafter(floor, np.float32(MASKED))), MASKED, inplace=True)  # keeps what is above
