"""From a function call's arguments to a GenerateRequest; the same for the async and the sync client."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from operator import index
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from tandem import codec
from tandem.client_errors import InvalidRequestError
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import DraftProbsTransport, LogprobsMode, VerificationPolicy

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
EnumT = TypeVar("EnumT", bound=StrEnum)


class GenerateOptions(TypedDict, total=False):
    """What a request may say; what it leaves out, or sets to None, takes the server's default."""

    temperature: float | None  # default 1; at most 1e-5 is greedy
    top_p: float | None  # in (0, 1]
    top_k: int | None  # 0: off
    min_p: float | None  # in [0, 1]
    repetition_penalty: float | None  # in [0.01, 10]; 1: off
    presence_penalty: float | None  # in [-2, 2]
    frequency_penalty: float | None  # in [-2, 2]
    logit_bias: Mapping[int, float] | None  # token id -> in [-100, 100]
    seed: int | None  # unset: drawn by the server, and part of the result
    bad_token_ids: Iterable[int] | None  # never sampled
    allowed_token_ids: Iterable[int] | None  # nothing else is sampled
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Iterable[int] | None
    ignore_eos: bool | None
    include_stop_in_output: bool | None
    logprobs: bool | None  # True: the log-probability of every token
    top_logprobs: int | None  # likeliest tokens listed beside each, 0 to 20; needs `logprobs`
    logprobs_mode: LogprobsMode | str | None  # "raw" (default) or "processed"; needs `logprobs`
    speculation: bool | None  # False: plain decoding
    num_draft_tokens: int | None  # most drafts a round; 0: none
    verification_policy: VerificationPolicy | str | None  # "greedy", "coupled", "rejection" or "block"
    draft_probs_transport: DraftProbsTransport | str | None  # "one_hot", "coupled", "sparse" or "full"
    n: int | None  # answers, 1..16; default 1
    sample_index: int | None  # of the first answer; with the seed of several answers it gives one of them again
    priority: int | None  # -100..100; under load a higher one is served sooner; default 0
    request_id: str | None
    timeout: float | None  # seconds for the whole call; None: no limit


_REQUEST: dict[str, Callable[[Any], Any]] = {
    "request_id": str,
    "n": index,
    "sample_index": index,
    "priority": index,
}
_SAMPLING: dict[str, Callable[[Any], Any]] = {
    "temperature": float,
    "top_p": float,
    "top_k": index,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "logit_bias": dict,
    "seed": index,
    "bad_token_ids": list,
    "allowed_token_ids": list,
}
_STOPPING: dict[str, Callable[[Any], Any]] = {
    "max_tokens": index,
    "min_tokens": index,
    "stop": lambda stop: [stop] if isinstance(stop, str) else [_text(text) for text in stop],
    "stop_token_ids": list,
    "ignore_eos": bool,
    "include_stop_in_output": bool,
}
_LOGPROBS: dict[str, Callable[[Any], Any]] = {
    "top_logprobs": index,
    "logprobs_mode": lambda name: codec.logprobs_mode_to_proto(_member(name, LogprobsMode)),
}
_SPECULATION: dict[str, Callable[[Any], Any]] = {
    "speculation": bool,
    "num_draft_tokens": index,
    "verification_policy": lambda name: codec.policy_to_proto(_member(name, VerificationPolicy)),
    "draft_probs_transport": lambda name: codec.transport_to_proto(_member(name, DraftProbsTransport)),
}
_PROTO_NAMES = {"speculation": "enabled", "top_logprobs": "num_top", "logprobs_mode": "mode"}


def build_request(prompt: Prompt, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """The message; its fields are not checked beyond what the wire can carry.

    InvalidRequestError for a value of a wrong type or beyond the wire's range, TypeError for an unknown option.
    """
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}; there are: {', '.join(GenerateOptions.__annotations__)}")
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    given = {name: value for name, value in options.items() if value is not None}
    _ask_logprobs(request, given)
    for message, converters in (
        (request, _REQUEST),
        (request.sampling, _SAMPLING),
        (request.stopping, _STOPPING),
        (request.logprobs, _LOGPROBS),
        (request.speculation, _SPECULATION),
    ):
        for name, convert in converters.items():
            if name in given:
                _assign(message, name, given[name], convert)
    return request


def refuse_several(options: GenerateOptions) -> None:
    """InvalidRequestError for a number of answers other than one, where there is one result."""
    n = options.get("n")
    if n not in (None, 1):
        raise InvalidRequestError(
            "INVALID_ARGUMENT", f"n: {n!r} is not 1; complete() gives one result, complete_many() gives several"
        )


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    """Text, token ids, or chat messages (mappings with role and content)."""
    if isinstance(prompt, str):
        _assign(request, "text", prompt, str)
        return
    if isinstance(prompt, bytes | bytearray | Mapping) or not hasattr(prompt, "__len__"):
        raise InvalidRequestError(
            "INVALID_ARGUMENT",
            f"prompt: {type(prompt).__name__} is neither text, nor a list of token ids, nor a list of chat messages",
        )
    if len(prompt) > 0 and isinstance(prompt[0], Mapping):
        for number, turn in enumerate(prompt):
            if not isinstance(turn, Mapping) or not turn.keys() >= {"role", "content"}:
                raise InvalidRequestError("INVALID_ARGUMENT", f"prompt[{number}] has no role and content: {turn!r}")
            message = request.chat.messages.add()
            _assign(message, "role", turn["role"], _text)
            _assign(message, "content", turn["content"], _text)
    else:
        request.tokens.SetInParent()
        _assign(request.tokens, "ids", prompt, lambda ids: [index(token_id) for token_id in ids])


def _ask_logprobs(request: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    """Ask for them if wanted; InvalidRequestError for a count as `logprobs`, or for details of what is not wanted."""
    wanted = given.get("logprobs", False)
    if not isinstance(wanted, bool):
        problem = (
            f"logprobs: {wanted!r} is neither True nor False; top_logprobs takes the number of likeliest tokens"
        )
        raise InvalidRequestError("INVALID_ARGUMENT", problem)
    if wanted:
        request.logprobs.SetInParent()
        return
    for name in _LOGPROBS:
        if name in given:
            raise InvalidRequestError("INVALID_ARGUMENT", f"{name}: needs logprobs=True")


def _member(name: str, kind: type[EnumT]) -> EnumT:
    if name not in set(kind):
        raise ValueError(f"{name!r} is not offered; there are: {', '.join(kind)}")
    return kind(name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _assign(message: Any, name: str, value: Any, convert: Callable[[Any], Any]) -> None:
    """Set a scalar, repeated or map field; InvalidRequestError naming it when the value does not fit."""
    field = _PROTO_NAMES.get(name, name)
    try:
        converted = convert(value)
        if isinstance(converted, dict):
            getattr(message, field).update(converted)
        elif isinstance(converted, list):
            getattr(message, field).extend(converted)
        else:
            setattr(message, field, converted)
    except (TypeError, ValueError, KeyError) as error:
        label = "prompt" if name in ("ids", "text", "role", "content") else name
        raise InvalidRequestError("INVALID_ARGUMENT", f"{label}: {error}") from error
