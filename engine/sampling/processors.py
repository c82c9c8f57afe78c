"""From raw logits to the distribution a request asked for: one function for draft, target and plain decoding.

Every row is processed by itself, so that its result cannot depend on the rows beside it, bit for bit: no
reduction crosses rows, and sums of probabilities are float64.

Letters: R rows, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from engine.sampling.rows import Row
from tandem.types import SamplingParams, SessionSpec

_SORTED_SPANS = (5.0, 10.0, math.inf)  # below the largest logit, in which top_p sorts
_MASKED = -math.inf


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
    """The tokens of one request's committed prefix, counted once for all its rows."""

    def __init__(self, row: Row) -> None:
        self._seen = set(row.committed_token_ids)
        self._output_counts = Counter(row.committed_token_ids[row.spec.prompt_len :])

    def seen(self, row: Row) -> set[int]:
        """Every token of prompt and output before the row."""
        return self._seen.union(row.draft_token_ids)

    def output_counts(self, row: Row) -> Counter[int]:
        """How often each output token came before the row."""
        return self._output_counts + Counter(row.draft_token_ids)


def _process_row(logits: torch.Tensor, row: Row, requests: _Requests) -> None:
    """All processors on one row [V], in place."""
    sampling, spec = row.spec.sampling, row.spec
    if sampling.logit_bias:
        _add(logits, sampling.logit_bias)
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
    if 0 < sampling.top_k < logits.shape[0]:
        _keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1.0:
        _keep_top_p(logits, sampling.top_p)
    if sampling.min_p > 0.0:
        logits.masked_fill_(logits < float(logits.max()) + math.log(sampling.min_p), _MASKED)


def _has_penalties(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
    )


def _ids(token_ids: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    """The ids that the row has, as an index int64 [N]."""
    known = [token_id for token_id in token_ids if token_id < logits.shape[0]]
    return torch.tensor(known, dtype=torch.int64, device=logits.device)


def _add(logits: torch.Tensor, amounts: Mapping[int, float]) -> None:
    """Add an amount to each token's logit."""
    index = _ids(amounts, logits)
    values = [amount for token_id, amount in amounts.items() if token_id < logits.shape[0]]
    logits[index] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _penalise(logits: torch.Tensor, row: Row, history: _History) -> None:
    """Repetition scales prompt and output tokens towards "unlikely"; presence and frequency lower output tokens."""
    sampling = row.spec.sampling
    if sampling.repetition_penalty != 1.0:
        index = _ids(history.seen(row), logits)
        seen = logits[index]
        penalty = sampling.repetition_penalty
        logits[index] = torch.where(seen > 0, seen / penalty, seen * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        counts = history.output_counts(row)
        _add(logits, {token_id: -(presence + frequency * count) for token_id, count in counts.items()})


def _mask(logits: torch.Tensor, index: torch.Tensor) -> None:
    """Mask these tokens, unless nothing would be left."""
    before = logits[index]
    logits[index] = _MASKED
    if logits.max() == _MASKED:
        logits[index] = before


def _keep_top_k(logits: torch.Tensor, top_k: int) -> None:
    """Mask all but the `top_k` first by (logit descending, id ascending)."""
    threshold = torch.topk(logits, top_k).values[-1]
    num_above = int((logits > threshold).sum())
    ties = (logits == threshold).nonzero()[:, 0]
    logits.masked_fill_(logits < threshold, _MASKED)
    logits[ties[top_k - num_above :]] = _MASKED


def _keep_top_p(logits: torch.Tensor, top_p: float) -> None:
    """Keep a token while the probabilities before it, by (logit descending, id ascending), sum to less than top_p.

    The first is always kept. Only tokens near the largest logit are sorted, and more when they are too few.
    """
    # [V]
    probs = torch.softmax(logits.double(), dim=0)
    peak = float(logits.max())
    for span in _SORTED_SPANS:
        token_ids = (logits > peak - span).nonzero()[:, 0]  # ids ascending, equal logits together in or out
        token_ids = token_ids[torch.sort(logits[token_ids], descending=True, stable=True).indices]
        cumulative = probs[token_ids].cumsum(dim=0)
        if cumulative[-1] >= top_p:
            break
    kept = token_ids[: int((cumulative < top_p).sum()) + 1]
    values = logits[kept]
    logits.fill_(_MASKED)
    logits[kept] = values
