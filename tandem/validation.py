"""One place that says which request values are allowed; every message names the field, the value and the limit."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tandem.types import MAX_TOP_LOGPROBS, SamplingParams, SessionSpec

MAX_PROMPT_CHARS = 1024 * 1024  # before they are tokens: of a text, or of all messages of a chat
MAX_CHAT_MESSAGES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_TOKEN_ID_ENTRIES = 64  # of stop_token_ids, bad_token_ids
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_REQUEST_ID_CHARS = 128
MAX_HIDDEN_LAYERS = 8  # of a target, whose states one session can have
MAX_ANSWERS = 16  # to one request
MAX_PRIORITY = 100  # and -100 is the least
_LEAST_REPETITION_PENALTY = float(np.float32(0.01))  # as it travels, a little less than 0.01


class InvalidArgumentError(ValueError):
    """A request that cannot be served as it is; `field` is the name the caller used."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def check_range(field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    """Raise unless low <= value <= high (low < value when `low_open`); NaN never passes."""
    if not (low < value if low_open else low <= value) or not value <= high:
        opening = "(" if low_open else "["
        raise InvalidArgumentError(field, f"{value!r} is outside {opening}{_limit(low)}, {_limit(high)}]")


def _limit(value: float) -> str:
    """A whole number in full: 2**64 - 1 is not 1.8e+19."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise unless every id is in 0 .. vocab_size - 1."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError(f"{field}[{index}]", f"token id {token_id} is outside 0..{vocab_size - 1}")


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidArgumentError for the first sampling field out of its range."""
    check_range("sampling.temperature", sampling.temperature, 0.0, 100.0)
    check_range("sampling.top_p", sampling.top_p, 0.0, 1.0, low_open=True)
    check_range("sampling.min_p", sampling.min_p, 0.0, 1.0)
    check_range("sampling.top_k", sampling.top_k, 0, 2**31 - 1)
    check_range("sampling.repetition_penalty", sampling.repetition_penalty, _LEAST_REPETITION_PENALTY, 10.0)
    check_range("sampling.presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    check_range("sampling.frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    if sampling.seed is not None:
        check_range("sampling.seed", sampling.seed, 0, 2**64 - 1)
    check_count("sampling.logit_bias", sampling.logit_bias, MAX_LOGIT_BIAS_ENTRIES)
    check_token_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias) or abs(bias) > 100:
            raise InvalidArgumentError(f"sampling.logit_bias[{token_id}]", f"{bias!r} is outside [-100, 100]")
    check_count("sampling.bad_token_ids", sampling.bad_token_ids, MAX_TOKEN_ID_ENTRIES)
    check_token_ids("sampling.bad_token_ids", sampling.bad_token_ids, vocab_size)
    check_count("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    if sampling.allowed_token_ids and set(sampling.allowed_token_ids) <= set(sampling.bad_token_ids):
        raise InvalidArgumentError(
            "sampling.allowed_token_ids", "every allowed id is also in sampling.bad_token_ids; nothing is left"
        )


def check_count(field: str, values: Sequence[object] | Iterable[object], limit: int) -> None:
    """Raise when there are more than `limit` entries."""
    count = sum(1 for _ in values)
    if count > limit:
        raise InvalidArgumentError(field, f"{count} entries are more than the limit of {limit}")


def check_prompt_chars(field: str, texts: Iterable[str]) -> None:
    """Raise for more text than is worth tokenising, whatever the context."""
    num_chars = sum(map(len, texts))
    if num_chars > MAX_PROMPT_CHARS:
        raise InvalidArgumentError(
            field, f"{num_chars} characters are more than the limit of {MAX_PROMPT_CHARS} of a prompt"
        )


def check_stops(stops: Sequence[str]) -> None:
    """Raise for too many, empty or overlong stop strings."""
    check_count("stopping.stop", stops, MAX_STOP_STRINGS)
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidArgumentError(f"stopping.stop[{index}]", "a stop string must have at least 1 character")
        if len(stop) > MAX_STOP_STRING_CHARS:
            raise InvalidArgumentError(
                f"stopping.stop[{index}]",
                f"{len(stop)} characters are more than the limit of {MAX_STOP_STRING_CHARS}",
            )


def check_session(spec: SessionSpec, vocab_size: int, max_context: int) -> None:
    """Raise unless a model with this vocabulary and context can serve the session."""
    if not 1 <= spec.prompt_len <= len(spec.token_ids):
        raise InvalidArgumentError(
            "prompt", f"prompt_len {spec.prompt_len} is outside 1..{len(spec.token_ids)} (a prompt needs 1 token)"
        )
    check_token_ids("prompt", spec.token_ids, vocab_size)
    if spec.max_tokens < 1:
        raise InvalidArgumentError("stopping.max_tokens", f"{spec.max_tokens} is less than 1")
    if spec.max_len > max_context:
        raise InvalidArgumentError(
            "stopping.max_tokens",
            f"prompt of {spec.prompt_len} tokens + max_tokens {spec.max_tokens} = {spec.max_len} "
            f"is more than the context of {max_context} tokens",
        )
    if spec.min_tokens > spec.max_tokens:
        raise InvalidArgumentError(
            "stopping.min_tokens", f"{spec.min_tokens} is more than stopping.max_tokens {spec.max_tokens}"
        )
    check_count("stopping.stop_token_ids", spec.stop_token_ids, MAX_TOKEN_ID_ENTRIES)
    check_token_ids("stopping.stop_token_ids", sorted(spec.stop_token_ids), vocab_size)
    check_range("priority", spec.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if spec.logprobs is not None:
        check_range("logprobs.num_top", spec.logprobs.num_top, 0, MAX_TOP_LOGPROBS)
    check_sampling(spec.sampling, vocab_size)
    _check_token_left(spec, vocab_size)


def _check_token_left(spec: SessionSpec, vocab_size: int) -> None:
    """Raise when no token may be sampled, or none while min_tokens forbids the end."""
    allowed, bad = set(spec.sampling.allowed_token_ids), set(spec.sampling.bad_token_ids)
    if len(bad) >= vocab_size:
        raise InvalidArgumentError(
            "sampling.bad_token_ids", f"they are all {vocab_size} ids of the vocabulary; nothing is left"
        )
    forbidden = bad | spec.ending_token_ids
    if spec.min_tokens > 0 and (allowed <= forbidden if allowed else len(forbidden) >= vocab_size):
        raise InvalidArgumentError(
            "stopping.min_tokens",
            f"{spec.min_tokens} forbids EOS and stopping.stop_token_ids at first, and sampling.allowed_token_ids and "
            "sampling.bad_token_ids leave nothing else",
        )


def are_hidden_layers(layers: Sequence[int], num_layers: int) -> bool:
    """Whether states after these layers can be had of a target with `num_layers`: some, ascending, not too many."""
    ascending = zip((0, *layers), layers, strict=False)
    return (
        1 <= len(layers) <= MAX_HIDDEN_LAYERS
        and all(before < after for before, after in ascending)
        and layers[-1] <= num_layers
    )
