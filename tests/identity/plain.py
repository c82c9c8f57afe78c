"""What an answer must be, worked out the slow way: token by token, and over the whole text at every token."""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from engine.backends.toy_backend import LogitsOf
from engine.sampling.logprobs import token_logprobs
from engine.sampling.processors import process
from engine.sampling.rows import Row
from tandem.types import FinishReason, LogprobsMode, LogprobsOptions, SessionSpec, TokenLogprobs
from tandem.vocabulary import Vocabulary
from tests.sampling.helpers import sample


@dataclass(frozen=True)
class Answer:
    """One whole answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: str | int | None


def plain_tokens(spec: SessionSpec, logits_of: LogitsOf) -> Iterator[int]:
    """The tokens after the prompt, for ever: one row of logits a token, and no rounds, drafts or batches."""
    tokens = list(spec.token_ids)
    while True:
        row = Row(spec, tuple(tokens))
        (token_id,) = sample(process(_raw(logits_of, tokens), [row]), [row])
        yield token_id
        tokens.append(token_id)


def plain_logprobs(
    spec: SessionSpec,
    options: LogprobsOptions,
    logits_of: LogitsOf,
    token_ids: Sequence[int],
    vocabulary: Vocabulary,
) -> list[TokenLogprobs]:
    """Of the first tokens after the prompt, each from its own row, with the bytes that an application gets."""
    entries: list[TokenLogprobs] = []
    for index, token_id in enumerate(token_ids):
        tokens = (*spec.token_ids, *token_ids[:index])
        logits = _raw(logits_of, tokens)
        if options.mode is LogprobsMode.PROCESSED:
            logits = process(logits, [Row(spec, tokens)])
        (entry,) = token_logprobs(logits, [token_id], options.num_top)
        top_token_bytes = tuple(vocabulary.token_bytes(top_id) for top_id in entry.top_token_ids)
        own_bytes = vocabulary.token_bytes(token_id)
        entries.append(replace(entry, token_bytes=own_bytes, top_token_bytes=top_token_bytes))
    return entries


def _raw(logits_of: LogitsOf, tokens: Sequence[int]) -> torch.Tensor:
    """The model's logits [1, V] after these tokens."""
    return torch.from_numpy(logits_of(tokens)).clone()[None]


def answer_of(
    tokens: Iterable[int], spec: SessionSpec, vocabulary: Vocabulary, stops: Sequence[str], include_stop: bool
) -> Answer:
    """The answer that `tokens` begin with: up to an ending id, a stop string or max_tokens, whichever is first.

    A character belongs to the token that completes it, and what is not complete at the end to the last token; the
    text of the first min_tokens tokens is not searched. AssertionError when `tokens` reach no end.
    """
    output: list[int] = []
    num_unsearched = 0
    for token_id in tokens:
        may_stop = len(output) >= spec.min_tokens
        output.append(token_id)
        is_ending = may_stop and token_id in spec.ending_token_ids
        is_last = is_ending or len(output) == spec.max_tokens
        text = complete_text(vocabulary, output)
        if not may_stop:
            num_unsearched = len(text)
        found = first_stop(text[num_unsearched:], stops) if may_stop else None
        if is_last and found is None:
            text = vocabulary.decode(output, at_start=False)
            found = first_stop(text[num_unsearched:], stops) if may_stop else None
        if found is not None:
            start, stop = found
            text = text[: num_unsearched + start + (len(stop) if include_stop else 0)]
            return Answer(tuple(output), text, FinishReason.STOP, token_id if is_ending else stop)
        if is_last:
            reason = FinishReason.STOP if is_ending else FinishReason.LENGTH
            return Answer(tuple(output), text, reason, token_id if is_ending else None)
    raise AssertionError(f"{len(output)} tokens reach no end")


def complete_text(vocabulary: Vocabulary, token_ids: Sequence[int]) -> str:
    """The text of these tokens without a last character that is not complete yet."""
    shown = [token_id for token_id in token_ids if token_id not in vocabulary.special_ids]
    return codecs.utf_8_decode(b"".join(map(vocabulary.token_bytes, shown)), "replace", False)[0]


def first_stop(text: str, stops: Iterable[str]) -> tuple[int, str] | None:
    """(start, stop) of the stop string that ends first, the longest of those."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    end, negative_length, stop = min(found)
    return end + negative_length, stop
