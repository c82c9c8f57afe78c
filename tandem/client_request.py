"""From a function call's arguments to a GenerateRequest; the same for the async and the sync client."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias, TypedDict, Unpack

from tandem import codec
from tandem.client_errors import InvalidRequestError
from tandem.common.v1 import common_pb2 as pb_common
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import VerificationPolicy

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]


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
    speculation: bool | None  # False: plain decoding
    num_draft_tokens: int | None  # most drafts a round; 0: none
    verification_policy: VerificationPolicy | str | None  # "greedy", "coupled", "rejection" or "block"
    n: int | None  # answers, 1..16; default 1
    sample_index: int | None  # of the first answer; with the seed of several answers it gives one of them again
    request_id: str | None
    timeout: float | None  # seconds for the whole call; None: no limit


_REQUEST: dict[str, Callable[[Any], Any]] = {"request_id": str, "n": index, "sample_index": index}
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
_SPECULATION: dict[str, Callable[[Any], Any]] = {
    "speculation": bool,
    "num_draft_tokens": index,
    "verification_policy": lambda name: _policy(name),
}
_PROTO_NAMES = {"speculation": "enabled"}


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
    for message, converters in (
        (request, _REQUEST),
        (request.sampling, _SAMPLING),
        (request.stopping, _STOPPING),
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


def _policy(name: str) -> pb_common.VerificationPolicy.ValueType:
    if name not in set(VerificationPolicy):
        raise ValueError(f"{name!r} is not offered; there are: {', '.join(VerificationPolicy)}")
    return codec.policy_to_proto(VerificationPolicy(name))


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
