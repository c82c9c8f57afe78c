"""Every value survives the wire, and what no value can stand for is refused by name."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import codec
from tandem.common.v1 import common_pb2 as pb
from tandem.types import (
    MAX_DRAFT_PROBS_BYTES,
    MAX_PROPOSAL_TOKENS,
    DraftProbs,
    DraftProbsTransport,
    ErrorCode,
    FinishReason,
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

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
F32 = st.floats(width=32, allow_nan=False)
TOKENS = st.lists(U32, max_size=8).map(tuple)
SAMPLING = st.builds(
    SamplingParams,
    temperature=F32,
    top_p=F32,
    top_k=U32,
    min_p=F32,
    repetition_penalty=F32,
    presence_penalty=F32,
    frequency_penalty=F32,
    logit_bias=st.dictionaries(U32, F32, max_size=4),
    seed=U64,
    bad_token_ids=TOKENS,
    allowed_token_ids=TOKENS,
)
SPECS = st.builds(
    SessionSpec,
    token_ids=TOKENS,
    prompt_len=U32,
    sampling=SAMPLING,
    max_tokens=U32,
    min_tokens=U32,
    stop_token_ids=st.frozensets(U32, max_size=4),
    eos_token_ids=st.frozensets(U32, max_size=4),
    verification_policy=st.sampled_from(VerificationPolicy),
    draft_probs_transport=st.sampled_from(DraftProbsTransport),
    sample_index=U32,
    logprobs=st.none() | st.builds(LogprobsOptions, U32, st.sampled_from(LogprobsMode)),
)
BYTES = st.binary(max_size=4)
LOGPROBS = st.builds(
    TokenLogprobs,
    F32,
    U32,
    TOKENS,
    st.lists(F32, max_size=4).map(tuple),
    BYTES,
    st.lists(BYTES, max_size=4).map(tuple),
)
STAMPS = st.builds(Stamp, U64.map(SessionId), U32, U32, U32, U64)
VERDICTS = st.builds(
    Verdict,
    U32,
    U32,
    TOKENS,
    st.none() | st.sampled_from(FinishReason),
    st.builds(ItemTiming, U32, U32),
    U32,
    st.lists(LOGPROBS, max_size=3).map(tuple),
)
LOADS = st.builds(Load, U32, U32, F32, st.booleans(), U64, U64, U64)
INFOS = st.builds(
    ModelInfo,
    U32,
    st.text(),
    U32,
    st.text(),
    U32,
    st.text(),
    st.text(),
    st.text(),
    st.text(),
    st.booleans(),
    U32,
    U64,
)


@given(SPECS)
def test_sessions_survive_the_wire(spec: SessionSpec) -> None:
    sent = codec.session_to_proto(spec).SerializeToString()
    assert codec.session_from_proto(pb.OpenSession.FromString(sent)) == spec


@given(STAMPS, VERDICTS, LOADS, INFOS)
def test_stamps_verdicts_loads_and_handshakes_survive_the_wire(
    stamp: Stamp, verdict: Verdict, load: Load, info: ModelInfo
) -> None:
    assert codec.stamp_from_proto(codec.stamp_to_proto(stamp)) == stamp
    assert codec.verdict_from_proto(codec.verdict_to_proto(verdict)) == verdict
    assert codec.load_from_proto(codec.load_to_proto(load)) == load
    assert codec.model_info_from_proto(codec.model_info_to_proto(info)) == info


@given(st.lists(st.lists(st.tuples(U32, F32), min_size=1, max_size=128), max_size=4))
def test_sparse_proposals_survive_the_wire_bit_for_bit(rows: list[list[tuple[int, float]]]) -> None:
    probs = tuple(
        DraftProbs(np.array([i for i, _ in row], dtype=np.uint32), np.array([p for _, p in row], dtype=np.float32))
        for row in rows
    )
    sent = Proposal(tuple(range(len(rows))), probs)
    received = codec.proposal_from_proto(codec.proposal_to_proto(sent))
    assert received.draft_token_ids == sent.draft_token_ids
    for ours, theirs in zip(sent.draft_probs, received.draft_probs, strict=True):
        assert ours.token_ids is not None
        assert theirs.token_ids is not None
        assert ours.token_ids.tobytes() == theirs.token_ids.tobytes()
        assert ours.probs.tobytes() == theirs.probs.tobytes()


def test_a_whole_vocabulary_travels_without_its_ids() -> None:
    probs = np.linspace(0, 1, 1000, dtype=np.float32)
    message = codec.proposal_to_proto(Proposal((7,), (DraftProbs(None, probs),)))
    assert message.draft_probs[0].token_ids_u32 == b""
    (received,) = codec.proposal_from_proto(message).draft_probs
    assert received.token_ids is None
    assert received.probs.tobytes() == probs.tobytes()


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"])
def test_unset_zero_and_a_value_are_three_things(field: str) -> None:
    unset = getattr(codec.sampling_from_proto(pb.SamplingParams()), field)
    zero = getattr(codec.sampling_from_proto(pb.SamplingParams(**{field: 0})), field)
    assert unset == getattr(SamplingParams(), field)
    assert zero == 0
    assert zero is not None


def test_no_message_field_is_forgotten_by_the_codec() -> None:
    assert {f.name for f in pb.Load.DESCRIPTOR.fields} == set(codec._LOAD_FIELDS)
    assert {f.name for f in pb.ModelInfo.DESCRIPTOR.fields} == set(codec._INFO_FIELDS)
    lists = {"logit_bias", "bad_token_ids", "allowed_token_ids"}
    assert {f.name for f in pb.SamplingParams.DESCRIPTOR.fields} == {*codec._SCALAR_SAMPLING_FIELDS, *lists}


@pytest.mark.parametrize(
    ("message", "code", "named"),
    [
        (pb.Proposal(draft_token_ids=[1, 2], parents=[-1, -1]), ErrorCode.UNIMPLEMENTED, "tree"),
        (
            pb.Proposal(draft_token_ids=[1], draft_probs=[pb.DraftProbs()] * 2),
            ErrorCode.INVALID_ARGUMENT,
            "2 entries",
        ),
        (
            pb.Proposal(draft_token_ids=[1], draft_probs=[pb.DraftProbs(token_ids_u32=b"123", probs_f32=b"123")]),
            ErrorCode.INVALID_ARGUMENT,
            r"draft_probs\[0\]",
        ),
        (
            pb.Proposal(draft_token_ids=[1] * (MAX_PROPOSAL_TOKENS + 1)),
            ErrorCode.INVALID_ARGUMENT,
            f"{MAX_PROPOSAL_TOKENS + 1} drafts are more than the limit of {MAX_PROPOSAL_TOKENS}",
        ),
    ],
)
def test_proposals_without_a_meaning_are_refused_by_name(message: pb.Proposal, code: ErrorCode, named: str) -> None:
    with pytest.raises(ItemError, match=named) as caught:
        codec.proposal_from_proto(message)
    assert caught.value.code is code


def test_unknown_policies_and_transports_are_refused_and_list_what_exists() -> None:
    with pytest.raises(ItemError, match="greedy, coupled, rejection, block"):
        codec.policy_from_proto(77)
    with pytest.raises(ItemError, match="one_hot, coupled, sparse, full"):
        codec.transport_from_proto(77)


@pytest.mark.parametrize("field", ["verification_policy", "draft_probs_transport", "sampling.seed"])
def test_what_a_session_must_say_between_services_is_refused_by_name_when_it_is_missing(field: str) -> None:
    message = codec.session_to_proto(SessionSpec((1,), 1, SamplingParams(seed=3), max_tokens=4))
    assert codec.session_from_proto(message).sampling.seed == 3
    holder, _, name = field.rpartition(".")
    (getattr(message, holder) if holder else message).ClearField(name)
    with pytest.raises(ItemError, match=f"open.{field}: must be set between services"):
        codec.session_from_proto(message)


def test_draft_probs_over_the_limit_of_a_proposal_are_refused_with_both_figures() -> None:
    entry = pb.DraftProbs(probs_f32=bytes(MAX_DRAFT_PROBS_BYTES // 2))
    codec.proposal_from_proto(pb.Proposal(draft_token_ids=[1, 2], draft_probs=[entry, entry]))
    entry.probs_f32 += bytes(4)
    with pytest.raises(ItemError, match="16777224 bytes are more than the limit of 16777216") as caught:
        codec.proposal_from_proto(pb.Proposal(draft_token_ids=[1, 2], draft_probs=[entry, entry]))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_a_later_builds_transports_are_left_out_of_those_that_are_known() -> None:
    known = codec.known_transports([pb.DRAFT_PROBS_TRANSPORT_FULL, 77, 0])  # type: ignore[list-item]
    assert known == {DraftProbsTransport.FULL}


def test_an_unknown_error_code_reads_as_internal() -> None:
    received = pb.ItemError.FromString(b"\x08\x63\x12\x03new")  # code 99
    assert codec.error_from_proto(received).code is ErrorCode.INTERNAL
