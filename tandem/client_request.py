"""From a function call's arguments to a GenerateRequest; the same for the async and the sync client."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack

from tandem import client_values as values
from tandem import codec
from tandem.client_errors import InvalidRequestError
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.types import DraftProbsTransport, LogprobsMode, VerificationPolicy
from tandem.validation import InvalidArgumentError

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


_Converter: TypeAlias = Callable[[str, Any], Any]  # of an option's name and value
_REQUEST: dict[str, _Converter] = {
    "request_id": values.text,
    "n": values.uint32,
    "sample_index": values.uint32,
    "priority": values.int32,
}
_SAMPLING: dict[str, _Converter] = {
    "temperature": values.float32,
    "top_p": values.float32,
    "top_k": values.uint32,
    "min_p": values.float32,
    "repetition_penalty": values.float32,
    "presence_penalty": values.float32,
    "frequency_penalty": values.float32,
    "logit_bias": values.biases,
    "seed": values.uint64,
    "bad_token_ids": values.token_ids,
    "allowed_token_ids": values.token_ids,
}
_STOPPING: dict[str, _Converter] = {
    "max_tokens": values.uint32,
    "min_tokens": values.uint32,
    "stop": values.texts,
    "stop_token_ids": values.token_ids,
    "ignore_eos": values.boolean,
    "include_stop_in_output": values.boolean,
}
_LOGPROBS: dict[str, _Converter] = {
    "top_logprobs": values.uint32,
    "logprobs_mode": values.member_of(LogprobsMode, codec.logprobs_mode_to_proto),
}
_SPECULATION: dict[str, _Converter] = {
    "speculation": values.boolean,
    "num_draft_tokens": values.uint32,
    "verification_policy": values.member_of(VerificationPolicy, codec.policy_to_proto),
    "draft_probs_transport": values.member_of(DraftProbsTransport, codec.transport_to_proto),
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
    given = {name: value for name, value in options.items() if value is not None}
    try:
        _set_prompt(request, prompt)
        _ask_logprobs(request, given)
        values.timeout(given.get("timeout"))
        for message, converters in (
            (request, _REQUEST),
            (request.sampling, _SAMPLING),
            (request.stopping, _STOPPING),
            (request.logprobs, _LOGPROBS),
            (request.speculation, _SPECULATION),
        ):
            for name, convert in converters.items():
                if name in given:
                    _assign(message, _PROTO_NAMES.get(name, name), convert(name, given[name]))
    except InvalidArgumentError as error:
        raise InvalidRequestError("INVALID_ARGUMENT", str(error)) from error
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
        request.text = values.text("prompt", prompt)
        return
    if isinstance(prompt, bytes | bytearray | Mapping) or not hasattr(prompt, "__len__"):
        raise InvalidArgumentError(
            "prompt",
            f"{type(prompt).__name__} is neither text, nor a list of token ids, nor a list of chat messages",
        )
    if len(prompt) > 0 and isinstance(prompt[0], Mapping):
        for number, turn in enumerate(prompt):
            if not isinstance(turn, Mapping) or not turn.keys() >= {"role", "content"}:
                raise InvalidArgumentError(f"prompt[{number}]", f"has no role and content: {turn!r}")
            request.chat.messages.add(
                role=values.text(f"prompt[{number}].role", turn["role"]),
                content=values.text(f"prompt[{number}].content", turn["content"]),
            )
    else:
        request.tokens.SetInParent()
        request.tokens.ids.extend(values.token_ids("prompt", prompt))


def _ask_logprobs(request: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    """Ask for them if wanted; InvalidArgumentError for a count as `logprobs`, or for details of what is not wanted."""
    wanted = given.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise InvalidArgumentError(
            "logprobs", f"{wanted!r} is neither True nor False; top_logprobs takes the number of likeliest tokens"
        )
    if wanted:
        request.logprobs.SetInParent()
        return
    for name in _LOGPROBS:
        if name in given:
            raise InvalidArgumentError(name, "needs logprobs=True")


def _assign(message: Any, field: str, value: Any) -> None:
    """Set a scalar, repeated or map field."""
    if isinstance(value, dict):
        getattr(message, field).update(value)
    elif isinstance(value, list):
        getattr(message, field).extend(value)
    else:
        setattr(message, field, value)
