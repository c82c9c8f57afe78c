"""An application's request, checked and completed before anything is scheduled for it."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import grpc

from orchestrator.resumed_answers import check_resumed
from tandem import codec
from tandem.chat_template import ChatTemplateError
from tandem.defaults import MAX_TOKENS
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.serving.errors import ServiceError
from tandem.types import DraftProbsTransport, ItemError, LogprobsOptions, ModelInfo, SessionSpec, VerificationPolicy
from tandem.validation import (
    MAX_ANSWERS,
    MAX_CHAT_MESSAGES,
    MAX_REQUEST_ID_CHARS,
    InvalidArgumentError,
    check_count,
    check_prompt_chars,
    check_range,
    check_session,
    check_stops,
)
from tandem.vocabulary import Vocabulary, VocabularyError

_MAX_SHOWN = 200  # characters of what a request said
_NUM_SAMPLE_INDICES = 2**32  # a noise counter's word
_RATIO_TEST_TRANSPORTS = (DraftProbsTransport.SPARSE, DraftProbsTransport.ONE_HOT, DraftProbsTransport.FULL)
# What each policy can use; the first is taken unless the request says otherwise.
_TRANSPORTS: Mapping[VerificationPolicy, tuple[DraftProbsTransport, ...]] = MappingProxyType(
    {
        VerificationPolicy.GREEDY: (DraftProbsTransport.ONE_HOT,),
        VerificationPolicy.COUPLED: (DraftProbsTransport.COUPLED, DraftProbsTransport.ONE_HOT),
        VerificationPolicy.REJECTION: _RATIO_TEST_TRANSPORTS,
        VerificationPolicy.BLOCK: _RATIO_TEST_TRANSPORTS,
    }
)
# Their ratio tests compare the target's probabilities with the q that the draft service sends.
_TRUSTING_POLICIES = frozenset({VerificationPolicy.REJECTION, VerificationPolicy.BLOCK})


@dataclass(frozen=True, slots=True)
class Offer:
    """What can be served now; the limits that requests are checked against."""

    vocabulary: Vocabulary
    model: ModelInfo  # of the targets, which all compute the same
    vocab_size: int  # ids the target knows, padding included
    max_context: int  # most tokens of a sequence
    num_draft_tokens: int  # a round's drafts unless the request says otherwise; 0: no speculation
    max_draft_tokens: int  # most a request may ask for
    draft_transports: frozenset[DraftProbsTransport]  # how the draft service can send q
    trusts_drafts: bool = True  # whether an answer may depend on what the draft service says of its drafts


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can be served as it is; every default is filled in."""

    request_id: str
    spec: SessionSpec  # with the prompt, and a seed; the same for all answers but for the sample index
    stops: tuple[str, ...]
    include_stop: bool
    num_draft_tokens: int  # most drafts a round; 0: no draft traffic
    may_draft_less: bool  # the number is the server's choice, and decides nothing but the time
    resumed: Mapping[int, tuple[int, ...]]  # by sample index: tokens that there are already


def request_id_of(request: pb.GenerateRequest) -> str:
    """Its name; one that has none is given one, which it keeps."""
    if not request.request_id:
        request.request_id = f"req-{secrets.token_hex(8)}"
    return request.request_id


def check_answers(request: pb.GenerateRequest, max_requests: int) -> range:
    """The sample indices of the answers asked for, one each; quick, and all that admission needs to know.

    Raises InvalidArgumentError naming field and limit, also for more answers than could ever run here.
    """
    sample_indices = codec.sample_indices(request)
    num_answers = len(sample_indices)
    check_range("n", num_answers, 1, MAX_ANSWERS)
    if num_answers > max_requests:
        raise InvalidArgumentError(
            "n", f"{num_answers} answers are more than the {max_requests} of max_requests, the most that run here"
        )
    if sample_indices.stop > _NUM_SAMPLE_INDICES:
        raise InvalidArgumentError(
            "sample_index",
            f"{sample_indices.start} + n {num_answers} is more than the limit of {_NUM_SAMPLE_INDICES}",
        )
    return sample_indices


def check_request(request: pb.GenerateRequest, offer: Offer) -> CheckedRequest:
    """The request with its defaults. Tokenises, so it may take a while: not for the event loop.

    Raises InvalidArgumentError naming field and limit, ServiceError UNIMPLEMENTED for a policy or transport that is
    unknown or may not be used here.
    """
    if len(request.request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidArgumentError(
            "request_id", f"{len(request.request_id)} characters are more than the limit of {MAX_REQUEST_ID_CHARS}"
        )
    check_stops(request.stopping.stop)
    num_draft_tokens = _num_draft_tokens(request.speculation, offer)
    spec = _session_spec(request, _prompt(request, offer), offer)
    check_session(spec, offer.vocab_size, offer.max_context)
    if num_draft_tokens > 0 and not offer.trusts_drafts:
        _check_needs_no_trust(spec.verification_policy)
    _check_numerics(request, offer)
    resumed = check_resumed(request, spec, offer.vocab_size)
    return CheckedRequest(
        request_id=request_id_of(request),
        spec=spec,
        stops=tuple(request.stopping.stop),
        include_stop=request.stopping.include_stop_in_output,
        num_draft_tokens=num_draft_tokens,
        may_draft_less=(
            not request.speculation.HasField("num_draft_tokens")
            and spec.verification_policy not in _TRUSTING_POLICIES
        ),
        resumed=resumed,
    )


def _check_numerics(request: pb.GenerateRequest, offer: Offer) -> None:
    """Nobody gets half an answer of one model and half of another: ServiceError FAILED_PRECONDITION."""
    if request.numerics not in ("", offer.model.numerics):
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"numerics: {request.numerics[:_MAX_SHOWN]!r} is asked for, and the targets here compute "
            f"{offer.model.numerics!r}",
        )


def _prompt(request: pb.GenerateRequest, offer: Offer) -> tuple[int, ...]:
    """The prompt's token ids, at least one, leaving room for one more in the context."""
    kind = request.WhichOneof("prompt")
    try:
        if kind == "text":
            check_prompt_chars(kind, [request.text])
            token_ids = offer.vocabulary.encode(request.text) if request.text else []
        elif kind == "chat":
            check_count("chat.messages", request.chat.messages, MAX_CHAT_MESSAGES)
            check_prompt_chars("chat.messages", (turn.content for turn in request.chat.messages))
            messages = [{"role": turn.role, "content": turn.content} for turn in request.chat.messages]
            token_ids = offer.vocabulary.encode_chat(messages)
        elif kind == "tokens":
            token_ids = list(request.tokens.ids)
        else:
            raise InvalidArgumentError("prompt", "is missing; set one of text, tokens, chat")
    except (VocabularyError, ChatTemplateError) as error:
        raise InvalidArgumentError(kind or "prompt", str(error)) from error
    if not token_ids:
        raise InvalidArgumentError(kind, "the prompt is empty; it needs at least 1 token")
    if len(token_ids) >= offer.max_context:
        raise InvalidArgumentError(
            kind,
            f"the prompt of {len(token_ids)} tokens leaves no room in the context of {offer.max_context} tokens; "
            f"the limit is {offer.max_context - 1}",
        )
    return tuple(token_ids)


def _session_spec(request: pb.GenerateRequest, prompt: tuple[int, ...], offer: Offer) -> SessionSpec:
    stopping = request.stopping
    sampling = codec.sampling_from_proto(request.sampling)
    sampling = replace(
        sampling,
        seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
        allowed_token_ids=tuple(dict.fromkeys(sampling.allowed_token_ids)),
    )
    try:
        policy = sampling.choose_policy(codec.policy_from_proto(request.speculation.verification_policy))
        asked_transport = codec.transport_from_proto(request.speculation.draft_probs_transport)
    except ItemError as error:
        raise ServiceError(grpc.StatusCode.UNIMPLEMENTED, f"speculation.{error.message}") from error
    room = offer.max_context - len(prompt)
    has_max_tokens = stopping.HasField("max_tokens")
    return SessionSpec(
        token_ids=prompt,
        prompt_len=len(prompt),
        sampling=sampling,
        max_tokens=stopping.max_tokens if has_max_tokens else min(MAX_TOKENS, room),
        min_tokens=stopping.min_tokens,
        stop_token_ids=frozenset(stopping.stop_token_ids),
        eos_token_ids=frozenset() if stopping.ignore_eos else frozenset(offer.vocabulary.eos_token_ids),
        verification_policy=policy,
        draft_probs_transport=_transport(asked_transport, policy, offer),
        logprobs=_logprobs(request),
        priority=request.priority,
    )


def _check_needs_no_trust(policy: VerificationPolicy) -> None:
    """ServiceError UNIMPLEMENTED for a policy whose distribution is right only if drafts come from where q says."""
    if policy in _TRUSTING_POLICIES:
        others = ", ".join(one for one in VerificationPolicy if one not in _TRUSTING_POLICIES)
        raise ServiceError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"speculation.verification_policy: {policy.value!r} relies on what the draft service says of its drafts, "
            f"which is not trusted here; there are: {others}; or set speculation.enabled to false",
        )


def _logprobs(request: pb.GenerateRequest) -> LogprobsOptions | None:
    """What is asked of them; ServiceError UNIMPLEMENTED for a mode that is not offered."""
    if not request.HasField("logprobs"):
        return None
    try:
        return codec.logprobs_options_from_proto(request.logprobs)
    except ItemError as error:
        raise ServiceError(grpc.StatusCode.UNIMPLEMENTED, error.message) from error


def _transport(asked: DraftProbsTransport | None, policy: VerificationPolicy, offer: Offer) -> DraftProbsTransport:
    """How q travels: as asked, else as suits the policy; one-hot drafts where the draft service cannot do that.

    InvalidArgumentError, naming both, for a transport that the policy cannot use.
    """
    usable = _TRANSPORTS[policy]
    if asked is not None and asked not in usable:
        raise InvalidArgumentError(
            "speculation.draft_probs_transport",
            f"{asked.value!r} cannot be used under verification policy {policy.value!r}, which is what these sampling "
            f"parameters and speculation.verification_policy give; it can use: {', '.join(usable)}",
        )
    wanted = asked or usable[0]
    return wanted if wanted in offer.draft_transports else DraftProbsTransport.ONE_HOT


def _num_draft_tokens(options: pb.SpeculationOptions, offer: Offer) -> int:
    """Most drafts a round: 0 when the request or the server does without."""
    if options.HasField("num_draft_tokens"):
        check_range("speculation.num_draft_tokens", options.num_draft_tokens, 0, offer.max_draft_tokens)
    if options.HasField("enabled") and not options.enabled:
        return 0
    if options.HasField("num_draft_tokens"):
        return options.num_draft_tokens
    return min(offer.num_draft_tokens, offer.max_draft_tokens)
