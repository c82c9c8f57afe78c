"""Protobuf <-> values: the only place that maps fields.

`*_to_proto` never fails. `*_from_proto` raises `ItemError` for what no value can stand for: a tree proposal, a
reserved policy or transport, bytes that are not whole numbers.
"""

from collections.abc import Iterable
from dataclasses import fields
from types import MappingProxyType

import numpy as np

from tandem.common.v1 import common_pb2 as pb
from tandem.orchestrator.v1 import orchestrator_pb2
from tandem.target.v1 import target_pb2
from tandem.types import (
    MAX_DRAFT_PROBS_BYTES,
    MAX_PROPOSAL_TOKENS,
    MAX_SPARSE_ENTRIES,
    DraftProbs,
    DraftProbsTransport,
    ErrorCode,
    FinishReason,
    HiddenStates,
    ItemError,
    ItemTiming,
    Load,
    LogprobsMode,
    LogprobsOptions,
    ModelInfo,
    Proposal,
    SamplingParams,
    SessionId,
    SessionSpec,
    Stamp,
    TokenLogprobs,
    Verdict,
    VerificationPolicy,
)

_POLICIES = {
    pb.VERIFICATION_POLICY_GREEDY: VerificationPolicy.GREEDY,
    pb.VERIFICATION_POLICY_COUPLED: VerificationPolicy.COUPLED,
    pb.VERIFICATION_POLICY_REJECTION: VerificationPolicy.REJECTION,
    pb.VERIFICATION_POLICY_BLOCK: VerificationPolicy.BLOCK,
}
_POLICY_NUMBERS = {policy: number for number, policy in _POLICIES.items()}
_TRANSPORTS = {
    pb.DRAFT_PROBS_TRANSPORT_ONE_HOT: DraftProbsTransport.ONE_HOT,
    pb.DRAFT_PROBS_TRANSPORT_COUPLED: DraftProbsTransport.COUPLED,
    pb.DRAFT_PROBS_TRANSPORT_SPARSE: DraftProbsTransport.SPARSE,
    pb.DRAFT_PROBS_TRANSPORT_FULL: DraftProbsTransport.FULL,
}
_TRANSPORT_NUMBERS = {transport: number for number, transport in _TRANSPORTS.items()}
_LOGPROBS_MODES = {
    pb.LOGPROBS_MODE_UNSPECIFIED: LogprobsMode.RAW,
    pb.LOGPROBS_MODE_RAW: LogprobsMode.RAW,
    pb.LOGPROBS_MODE_PROCESSED: LogprobsMode.PROCESSED,
}
_LOGPROBS_MODE_NUMBERS = {mode: number for number, mode in _LOGPROBS_MODES.items()}
_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORTED: FinishReason.ABORTED,
    pb.FINISH_REASON_ERROR: FinishReason.ERROR,
}
_FINISH_REASON_NUMBERS = {reason: number for number, reason in _FINISH_REASONS.items()}
_SCALAR_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


def policy_to_proto(policy: VerificationPolicy) -> pb.VerificationPolicy.ValueType:
    return _POLICY_NUMBERS[policy]


def policy_from_proto(number: pb.VerificationPolicy.ValueType) -> VerificationPolicy | None:
    """None when unspecified; ItemError UNIMPLEMENTED for one that is not offered."""
    if number == pb.VERIFICATION_POLICY_UNSPECIFIED:
        return None
    if number not in _POLICIES:
        names = ", ".join(policy.value for policy in VerificationPolicy)
        raise ItemError(ErrorCode.UNIMPLEMENTED, f"verification_policy {number} is not offered; there are: {names}")
    return _POLICIES[number]


def transport_to_proto(transport: DraftProbsTransport) -> pb.DraftProbsTransport.ValueType:
    return _TRANSPORT_NUMBERS[transport]


def transport_from_proto(number: pb.DraftProbsTransport.ValueType) -> DraftProbsTransport | None:
    """None when unspecified; ItemError UNIMPLEMENTED for one that is not offered."""
    if number == pb.DRAFT_PROBS_TRANSPORT_UNSPECIFIED:
        return None
    if number not in _TRANSPORTS:
        names = ", ".join(transport.value for transport in DraftProbsTransport)
        raise ItemError(
            ErrorCode.UNIMPLEMENTED, f"draft_probs_transport {number} is not offered; there are: {names}"
        )
    return _TRANSPORTS[number]


def known_transports(numbers: Iterable[pb.DraftProbsTransport.ValueType]) -> frozenset[DraftProbsTransport]:
    """Those that this build knows."""
    return frozenset(_TRANSPORTS[number] for number in numbers if number in _TRANSPORTS)


def sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    """Every field set, so that the receiver's defaults never matter."""
    message = pb.SamplingParams(
        logit_bias=sampling.logit_bias,
        bad_token_ids=sampling.bad_token_ids,
        allowed_token_ids=sampling.allowed_token_ids,
    )
    for name in _SCALAR_SAMPLING_FIELDS:
        value = getattr(sampling, name)
        if value is not None:
            setattr(message, name, value)
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Unset fields take the defaults of `SamplingParams`."""
    present = {descriptor.name: value for descriptor, value in message.ListFields()}
    scalars = {name: present[name] for name in _SCALAR_SAMPLING_FIELDS if name in present}
    return SamplingParams(
        logit_bias=MappingProxyType(dict(message.logit_bias)),
        bad_token_ids=tuple(message.bad_token_ids),
        allowed_token_ids=tuple(message.allowed_token_ids),
        **scalars,
    )


def logprobs_mode_to_proto(mode: LogprobsMode) -> pb.LogprobsMode.ValueType:
    return _LOGPROBS_MODE_NUMBERS[mode]


def logprobs_options_to_proto(options: LogprobsOptions | None) -> pb.LogprobsOptions | None:
    if options is None:
        return None
    return pb.LogprobsOptions(num_top=options.num_top, mode=logprobs_mode_to_proto(options.mode))


def logprobs_options_from_proto(message: pb.LogprobsOptions) -> LogprobsOptions:
    """ItemError UNIMPLEMENTED for a mode that is not offered."""
    if message.mode not in _LOGPROBS_MODES:
        names = ", ".join(LogprobsMode)
        raise ItemError(ErrorCode.UNIMPLEMENTED, f"logprobs.mode {message.mode} is not offered; there are: {names}")
    return LogprobsOptions(message.num_top, _LOGPROBS_MODES[message.mode])


def token_logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
        token_bytes=logprobs.token_bytes,
        top_token_bytes=logprobs.top_token_bytes,
    )


def token_logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        message.logprob,
        message.rank,
        tuple(message.top_token_ids),
        tuple(message.top_logprobs),
        message.token_bytes,
        tuple(message.top_token_bytes),
    )


def session_to_proto(spec: SessionSpec) -> pb.OpenSession:
    return pb.OpenSession(
        token_ids=spec.token_ids,
        prompt_len=spec.prompt_len,
        sampling=sampling_to_proto(spec.sampling),
        max_tokens=spec.max_tokens,
        min_tokens=spec.min_tokens,
        stop_token_ids=sorted(spec.stop_token_ids),
        eos_token_ids=sorted(spec.eos_token_ids),
        verification_policy=policy_to_proto(spec.verification_policy),
        draft_probs_transport=transport_to_proto(spec.draft_probs_transport),
        sample_index=spec.sample_index,
        logprobs=logprobs_options_to_proto(spec.logprobs),
        priority=spec.priority,
    )


def session_from_proto(message: pb.OpenSession) -> SessionSpec:
    """ItemError INVALID_ARGUMENT when the policy, the transport or the seed is missing."""
    policy = policy_from_proto(message.verification_policy)
    if policy is None:
        raise ItemError(ErrorCode.INVALID_ARGUMENT, "open.verification_policy: must be set between services")
    if not message.sampling.HasField("seed"):
        raise ItemError(ErrorCode.INVALID_ARGUMENT, "open.sampling.seed: must be set between services")
    transport = transport_from_proto(message.draft_probs_transport)
    if transport is None:
        raise ItemError(ErrorCode.INVALID_ARGUMENT, "open.draft_probs_transport: must be set between services")
    return SessionSpec(
        token_ids=tuple(message.token_ids),
        prompt_len=message.prompt_len,
        sampling=sampling_from_proto(message.sampling),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        eos_token_ids=frozenset(message.eos_token_ids),
        verification_policy=policy,
        draft_probs_transport=transport,
        sample_index=message.sample_index,
        logprobs=logprobs_options_from_proto(message.logprobs) if message.HasField("logprobs") else None,
        priority=message.priority,
    )


def sample_indices(request: orchestrator_pb2.GenerateRequest) -> range:
    """Those of the answers asked for: one unless `n` is set."""
    num_answers = request.n if request.HasField("n") else 1
    return range(request.sample_index, request.sample_index + num_answers)


def stamp_to_proto(stamp: Stamp) -> pb.Stamp:
    return pb.Stamp(
        session_id=stamp.session_id,
        epoch=stamp.epoch,
        round=stamp.round,
        committed_len=stamp.committed_len,
        prefix_hash=stamp.prefix_hash,
    )


def stamp_from_proto(message: pb.Stamp) -> Stamp:
    return Stamp(
        SessionId(message.session_id), message.epoch, message.round, message.committed_len, message.prefix_hash
    )


def proposal_to_proto(proposal: Proposal) -> pb.Proposal:
    probs = [
        pb.DraftProbs(
            token_ids_u32=b""
            if entry.token_ids is None
            else np.ascontiguousarray(entry.token_ids, "<u4").tobytes(),
            probs_f32=np.ascontiguousarray(entry.probs, dtype="<f4").tobytes(),
        )
        for entry in proposal.draft_probs
    ]
    return pb.Proposal(draft_token_ids=proposal.draft_token_ids, draft_probs=probs, parents=proposal.parents)


def proposal_from_proto(message: pb.Proposal) -> Proposal:
    """ItemError UNIMPLEMENTED for a tree, INVALID_ARGUMENT for too many drafts and malformed draft_probs."""
    if message.parents:
        raise ItemError(ErrorCode.UNIMPLEMENTED, "proposal.parents: tree proposals are not offered; send a chain")
    if len(message.draft_token_ids) > MAX_PROPOSAL_TOKENS:  # to read them could take seconds
        raise ItemError(
            ErrorCode.INVALID_ARGUMENT,
            f"proposal.draft_token_ids: {len(message.draft_token_ids)} drafts are more than the limit of "
            f"{MAX_PROPOSAL_TOKENS}",
        )
    if message.draft_probs and len(message.draft_probs) != len(message.draft_token_ids):
        raise ItemError(
            ErrorCode.INVALID_ARGUMENT,
            f"proposal.draft_probs: {len(message.draft_probs)} entries for {len(message.draft_token_ids)} drafts",
        )
    num_bytes = sum(len(entry.token_ids_u32) + len(entry.probs_f32) for entry in message.draft_probs)
    if num_bytes > MAX_DRAFT_PROBS_BYTES:
        raise ItemError(
            ErrorCode.INVALID_ARGUMENT,
            f"proposal.draft_probs: {num_bytes} bytes are more than the limit of {MAX_DRAFT_PROBS_BYTES} of a proposal",
        )
    probs = tuple(_draft_probs_from_proto(index, entry) for index, entry in enumerate(message.draft_probs))
    return Proposal(tuple(message.draft_token_ids), probs)


def _draft_probs_from_proto(index: int, message: pb.DraftProbs) -> DraftProbs:
    """Without ids it is of the whole vocabulary; the receiver knows how large that may be."""
    num_id_bytes, num_prob_bytes = len(message.token_ids_u32), len(message.probs_f32)
    limit = 4 * MAX_SPARSE_ENTRIES
    is_full = num_id_bytes == 0
    if num_prob_bytes == 0 or num_prob_bytes % 4 or not (is_full or num_id_bytes == num_prob_bytes <= limit):
        raise ItemError(
            ErrorCode.INVALID_ARGUMENT,
            f"proposal.draft_probs[{index}]: {num_id_bytes} id bytes and {num_prob_bytes} probability bytes; "
            f"both must be the same multiple of 4, at most {limit}, or there must be no ids",
        )
    return DraftProbs(
        None if is_full else np.frombuffer(message.token_ids_u32, dtype="<u4").astype(np.uint32),
        np.frombuffer(message.probs_f32, dtype="<f4").astype(np.float32),
    )


def hidden_states_to_proto(states: HiddenStates) -> pb.HiddenStates:
    return pb.HiddenStates(first_row=states.first_row, num_rows=states.num_rows, states_bf16=states.data)


def hidden_states_from_proto(message: pb.HiddenStates) -> HiddenStates:
    """ItemError INVALID_ARGUMENT for bytes that are not whole rows."""
    num_bytes, num_rows = len(message.states_bf16), message.num_rows
    if num_bytes == 0 or num_rows == 0 or num_bytes % (2 * num_rows):
        raise ItemError(
            ErrorCode.INVALID_ARGUMENT,
            f"hidden_states: {num_bytes} bytes are not {num_rows} rows of bfloat16 numbers",
        )
    return HiddenStates(message.first_row, num_rows, message.states_bf16)


def timing_to_proto(timing: ItemTiming) -> pb.ItemTiming:
    return pb.ItemTiming(queue_us=timing.queue_us, compute_us=timing.compute_us)


def timing_from_proto(message: pb.ItemTiming) -> ItemTiming:
    return ItemTiming(message.queue_us, message.compute_us)


def finish_reason_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_REASON_NUMBERS[reason]


def finish_reason_from_proto(number: pb.FinishReason.ValueType) -> FinishReason | None:
    """None when unspecified; one this build does not know reads as ERROR."""
    return None if number == pb.FINISH_REASON_UNSPECIFIED else _FINISH_REASONS.get(number, FinishReason.ERROR)


def verdict_to_proto(verdict: Verdict) -> target_pb2.Verdict:
    return target_pb2.Verdict(
        num_draft_tokens=verdict.num_draft_tokens,
        num_accepted=verdict.num_accepted,
        token_ids=verdict.token_ids,
        finish_reason=finish_reason_to_proto(verdict.finish_reason),
        timing=timing_to_proto(verdict.timing),
        batch_rows=verdict.batch_rows,
        logprobs=map(token_logprobs_to_proto, verdict.logprobs),
        num_cached_tokens=verdict.num_cached_tokens,
    )


def verdict_from_proto(message: target_pb2.Verdict) -> Verdict:
    return Verdict(
        num_draft_tokens=message.num_draft_tokens,
        num_accepted=message.num_accepted,
        token_ids=tuple(message.token_ids),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        timing=timing_from_proto(message.timing),
        batch_rows=message.batch_rows,
        logprobs=tuple(map(token_logprobs_from_proto, message.logprobs)),
        num_cached_tokens=message.num_cached_tokens,
    )


def error_to_proto(error: ItemError) -> pb.ItemError:
    return pb.ItemError(code=pb.ItemErrorCode.ValueType(error.code), message=error.message)


def error_from_proto(message: pb.ItemError) -> ItemError:
    """A code this build does not know reads as INTERNAL."""
    number = int(message.code)
    return ItemError(ErrorCode(number) if number in set(ErrorCode) else ErrorCode.INTERNAL, message.message)


_LOAD_FIELDS = tuple(field.name for field in fields(Load))
_INFO_FIELDS = (
    "protocol_version",
    "model_id",
    "vocab_size",
    "vocab_hash",
    "max_context",
    "backend",
    "dtype",
    "device",
    "numerics_fingerprint",
    "deterministic",
    "max_draft_tokens",
    "incarnation",
    "num_layers",
    "hidden_size",
)


def load_to_proto(load: Load) -> pb.Load:
    return pb.Load(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def load_from_proto(message: pb.Load) -> Load:
    return Load(**{name: getattr(message, name) for name in _LOAD_FIELDS})


def model_info_to_proto(info: ModelInfo) -> pb.ModelInfo:
    return pb.ModelInfo(**{name: getattr(info, name) for name in _INFO_FIELDS})


def model_info_from_proto(message: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(**{name: getattr(message, name) for name in _INFO_FIELDS})
