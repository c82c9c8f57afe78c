"""A request is complete and within limits, or refused by field and limit, before anything is scheduled."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.requests import CheckedRequest, Offer, check_answers, check_request
from tandem.common.v1 import common_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.serving.errors import ServiceError
from tandem.types import DraftProbsTransport, LogprobsMode, LogprobsOptions, ModelInfo, VerificationPolicy
from tandem.validation import MAX_PROMPT_CHARS, InvalidArgumentError
from tandem.vocabulary import Vocabulary

VOCABULARY = Vocabulary.toy(64)
OFFER = Offer(
    vocabulary=VOCABULARY,
    model=ModelInfo(model_id="toy"),
    vocab_size=64,
    max_context=32,
    num_draft_tokens=4,
    max_draft_tokens=8,
    draft_transports=frozenset(DraftProbsTransport),
)
POLICY = "VERIFICATION_POLICY_"
USER = pb.ChatMessage(role="user", content="x")


def request(
    sampling: dict[str, Any] | None = None,
    stopping: dict[str, Any] | None = None,
    speculation: dict[str, Any] | None = None,
    **fields: Any,
) -> pb.GenerateRequest:
    """A request that would do, changed as told."""
    if not {"text", "tokens", "chat"} & fields.keys():
        fields["text"] = "abc"
    return pb.GenerateRequest(
        sampling=common_pb2.SamplingParams(**(sampling or {})),
        stopping=pb.StoppingCriteria(**(stopping or {})),
        speculation=pb.SpeculationOptions(**(speculation or {})),
        **fields,
    )


def check(offer: Offer = OFFER, **fields: Any) -> CheckedRequest:
    return check_request(request(**fields), offer)


def tokens(*ids: int) -> pb.TokenIds:
    return pb.TokenIds(ids=ids)


BAD = [
    ({"text": ""}, "text: the prompt is empty"),
    ({"tokens": tokens()}, "tokens: the prompt is empty"),
    ({"chat": pb.ChatMessages()}, "chat: messages is empty"),
    ({"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="alien", content="x")])}, r"chat: messages\[0\].role"),
    ({"text": "snow \u2603"}, "text: the text cannot be encoded"),
    ({"text": "a" * 32}, r"text: the prompt of 32 tokens .* limit is 31"),
    ({"tokens": tokens(*range(40))}, r"tokens: the prompt of 40 tokens .* context of 32"),
    ({"tokens": tokens(1, 64)}, r"prompt\[1\]: token id 64 is outside 0..63"),
    ({"tokens": tokens(2**31)}, r"prompt\[0\]: token id 2147483648"),
    ({"stopping": {"max_tokens": 0}}, "stopping.max_tokens: 0 is less than 1"),
    ({"stopping": {"max_tokens": 30}}, r"stopping.max_tokens: .* context of 32"),
    ({"stopping": {"max_tokens": 4, "min_tokens": 5}}, "stopping.min_tokens: 5 is more than stopping.max_tokens 4"),
    ({"stopping": {"stop": [""]}}, r"stopping.stop\[0\]"),
    ({"stopping": {"stop": ["x", ""]}}, r"stopping.stop\[1\]"),
    ({"stopping": {"stop": ["x"] * 17}}, "stopping.stop: 17 entries .* limit of 16"),
    ({"stopping": {"stop": ["x" * 10_000]}}, r"stopping.stop\[0\]: 10000 characters .* limit of 256"),
    ({"stopping": {"stop_token_ids": [64]}}, r"stopping.stop_token_ids\[0\]: token id 64"),
    ({"stopping": {"stop_token_ids": range(65)}}, "stopping.stop_token_ids: 65 entries"),
    ({"sampling": {"temperature": -1.0}}, "sampling.temperature: -1.0 is outside"),
    ({"sampling": {"temperature": float("nan")}}, "sampling.temperature: nan"),
    ({"sampling": {"temperature": float("inf")}}, "sampling.temperature: inf"),
    ({"sampling": {"top_p": 0.0}}, "sampling.top_p: 0.0"),
    ({"sampling": {"top_p": 1.5}}, "sampling.top_p: 1.5"),
    ({"sampling": {"min_p": -0.5}}, "sampling.min_p"),
    ({"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
    ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty"),
    ({"sampling": {"frequency_penalty": float("nan")}}, "sampling.frequency_penalty"),
    ({"sampling": {"top_k": 2**32 - 1}}, "sampling.top_k"),
    ({"sampling": {"logit_bias": {64: 1.0}}}, r"sampling.logit_bias\[0\]: token id 64"),
    ({"sampling": {"logit_bias": {1: 101.0}}}, r"sampling.logit_bias\[1\]"),
    ({"sampling": {"bad_token_ids": [64]}}, r"sampling.bad_token_ids\[0\]"),
    ({"sampling": {"allowed_token_ids": [1], "bad_token_ids": [1]}}, "nothing is left"),
    ({"sampling": {"bad_token_ids": range(64)}}, "sampling.bad_token_ids: they are all 64 ids of the vocabulary"),
    (
        {
            "sampling": {"allowed_token_ids": [5, 6], "bad_token_ids": [6]},
            "stopping": {"stop_token_ids": [5], "min_tokens": 3, "max_tokens": 4},
        },
        "stopping.min_tokens: 3 forbids EOS and stopping.stop_token_ids at first, and .* leave nothing else",
    ),
    (
        {
            "sampling": {"bad_token_ids": range(63)},
            "stopping": {"stop_token_ids": [63], "min_tokens": 1, "max_tokens": 4},
        },
        "stopping.min_tokens: 1 forbids",
    ),
    ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}}, "sampling.logit_bias: 1025 .* limit of 1024"),
    ({"sampling": {"bad_token_ids": [1] * 65}}, "sampling.bad_token_ids: 65 entries are more than the limit of 64"),
    ({"sampling": {"allowed_token_ids": range(65)}}, "sampling.allowed_token_ids: 65 .* limit of 64"),
    ({"sampling": {"top_k": 2**31}}, "sampling.top_k: 2147483648 is outside"),
    ({"chat": pb.ChatMessages(messages=[USER] * 1025)}, "chat.messages: 1025 entries .* limit of 1024"),
    ({"priority": 101}, r"priority: 101 is outside \[-100, 100\]"),
    ({"priority": -101}, r"priority: -101 is outside"),
    (
        {"sampling": {"seed": 1}, "stopping": {"max_tokens": 2}, "resume": [{"token_ids": [1, 2, 3]}]},
        r"resume\[0\].token_ids: 3 tokens are more than the 2 of max_tokens",
    ),
    ({"sampling": {"seed": 1}, "resume": [{}, {}]}, r"resume\[1\].sample_index: 0 is not one of 0..0, each once"),
    ({"speculation": {"num_draft_tokens": 9}}, r"speculation.num_draft_tokens: 9 is outside \[0, 8\]"),
    ({"logprobs": {"num_top": 21}}, r"logprobs.num_top: 21 is outside \[0, 20\]"),
    ({"request_id": "x" * 129}, "request_id: 129 characters are more than the limit of 128"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_input_is_refused_by_field_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check(**fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text": "a" * (MAX_PROMPT_CHARS + 1)}, "text"),
        (
            {
                "chat": pb.ChatMessages(
                    messages=[pb.ChatMessage(role="user", content="a" * (MAX_PROMPT_CHARS // 2 + 1))] * 2
                )
            },
            "chat.messages",
        ),
    ],
)
def test_more_text_than_any_prompt_may_have_is_refused_before_it_is_tokenised(
    fields: dict[str, Any], name: str
) -> None:
    def tokenise(text: str) -> list[int]:
        raise AssertionError("it is too long for that")

    offer = replace(OFFER, vocabulary=replace(VOCABULARY, encode_verbatim=tokenise))
    with pytest.raises(
        InvalidArgumentError, match=rf"{name}: 10485\d\d characters .* limit of 1048576 of a prompt"
    ):
        check(offer, **fields)


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_p": 0.0, "repetition_penalty": 0.01, "presence_penalty": -2.0, "logit_bias": {0: -100.0}},
        {"temperature": 100.0, "top_p": 1.0, "min_p": 1.0, "repetition_penalty": 10.0, "logit_bias": {63: 100.0}},
    ],
)
def test_a_limit_itself_is_allowed_in_the_precision_it_travels_in(sampling: dict[str, Any]) -> None:
    check(sampling=sampling)


def test_a_missing_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="prompt: is missing"):
        check_request(pb.GenerateRequest(), OFFER)


BAD_ANSWERS = [
    ({"n": 0}, 8, r"n: 0 is outside \[1, 16\]"),
    ({"n": 17}, 256, r"n: 17 is outside \[1, 16\]"),
    ({"n": 2**32 - 1, "sample_index": 2**32 - 1}, 8, r"n: 4294967295 is outside \[1, 16\]"),
    ({"n": 9}, 8, "n: 9 answers are more than the 8 of max_requests"),
    ({"n": 2, "sample_index": 2**32 - 1}, 8, r"sample_index: 4294967295 \+ n 2 is more than .* 4294967296"),
]


@pytest.mark.parametrize(("fields", "max_requests", "message"), BAD_ANSWERS)
def test_answers_beyond_a_limit_are_refused_by_field_and_limit(
    fields: dict[str, int], max_requests: int, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        check_answers(request(**fields), max_requests)


@pytest.mark.parametrize(
    ("fields", "sample_indices"),
    [
        ({}, range(1)),
        ({"n": 1, "sample_index": 7}, range(7, 8)),
        ({"n": 16}, range(16)),
        ({"n": 2, "sample_index": 2**32 - 2}, range(2**32 - 2, 2**32)),
    ],
)
def test_answers_are_one_unless_n_is_set_and_begin_at_the_sample_index(
    fields: dict[str, int], sample_indices: range
) -> None:
    assert check_answers(request(**fields), 16) == sample_indices


@pytest.mark.parametrize("number", [5, 77])
def test_a_policy_that_is_not_offered_is_unimplemented_by_name(number: int) -> None:
    with pytest.raises(ServiceError, match=r"verification_policy .* not offered; there are: greedy") as caught:
        check(speculation={"verification_policy": number})
    assert caught.value.code.name == "UNIMPLEMENTED"


def test_logprobs_are_off_unless_asked_for_and_raw_unless_told() -> None:
    mode = common_pb2.LOGPROBS_MODE_PROCESSED
    assert check().spec.logprobs is None
    assert check(logprobs={}).spec.logprobs == LogprobsOptions(0, LogprobsMode.RAW)
    assert check(logprobs={"num_top": 20, "mode": mode}).spec.logprobs == LogprobsOptions(
        20, LogprobsMode.PROCESSED
    )


def test_a_mode_of_logprobs_that_is_not_offered_is_unimplemented_by_name() -> None:
    with pytest.raises(ServiceError, match=r"logprobs.mode 7 is not offered; there are: raw, processed") as caught:
        check(logprobs={"mode": 7})
    assert caught.value.code.name == "UNIMPLEMENTED"


def test_unset_zero_and_a_value_are_three_things() -> None:
    unset = check().spec.sampling
    assert (unset.temperature, unset.top_p, unset.top_k) == (1.0, 1.0, 0)
    assert not unset.is_greedy
    assert check(sampling={"temperature": 0.0}).spec.sampling.is_greedy
    assert check(sampling={"seed": 0}).spec.sampling.seed == 0
    assert unset.seed is not None
    assert unset.seed != check().spec.sampling.seed


def test_max_tokens_default_to_what_the_context_leaves_and_no_more_than_256() -> None:
    assert check().spec.max_tokens == 29
    assert check(replace(OFFER, max_context=10_000)).spec.max_tokens == 256
    assert check(stopping={"max_tokens": 7}).spec.max_tokens == 7


def test_every_field_reaches_the_session() -> None:
    checked = check(
        request_id="mine",
        sampling={"temperature": 0.5, "seed": 9},
        stopping={
            "max_tokens": 9,
            "min_tokens": 2,
            "stop": ["x"],
            "stop_token_ids": [5],
            "include_stop_in_output": True,
        },
    )
    assert (checked.request_id, checked.stops, checked.include_stop) == ("mine", ("x",), True)
    spec = checked.spec
    assert (spec.token_ids, spec.prompt_len) == ((0, 1, 2), 3)
    assert (spec.max_tokens, spec.min_tokens, spec.stop_token_ids) == (9, 2, frozenset({5}))
    assert spec.eos_token_ids == {63}
    assert check(stopping={"ignore_eos": True}).spec.eos_token_ids == frozenset()
    assert check().request_id != check().request_id


def test_chat_goes_through_the_template_and_tokens_are_used_as_they_are() -> None:
    vocabulary = Vocabulary.toy(257)
    offer = replace(OFFER, vocabulary=vocabulary, vocab_size=257, max_context=100)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    assert vocabulary.decode(check(offer, chat=chat).spec.token_ids) == "user: hi\nassistant: "
    assert check(tokens=tokens(63, 0, 63)).spec.token_ids == (63, 0, 63)


@pytest.mark.parametrize(
    ("sampling", "asked", "policy", "transport"),
    [
        ({"temperature": 0.0}, "UNSPECIFIED", VerificationPolicy.GREEDY, DraftProbsTransport.ONE_HOT),
        ({"temperature": 0.0}, "REJECTION", VerificationPolicy.GREEDY, DraftProbsTransport.ONE_HOT),
        ({}, "UNSPECIFIED", VerificationPolicy.COUPLED, DraftProbsTransport.COUPLED),
        ({}, "GREEDY", VerificationPolicy.COUPLED, DraftProbsTransport.COUPLED),
        ({}, "REJECTION", VerificationPolicy.REJECTION, DraftProbsTransport.SPARSE),
        ({}, "BLOCK", VerificationPolicy.BLOCK, DraftProbsTransport.SPARSE),
    ],
)
def test_policy_and_transport_follow_from_temperature_and_wish(
    sampling: dict[str, Any], asked: str, policy: VerificationPolicy, transport: DraftProbsTransport
) -> None:
    speculation = {"verification_policy": POLICY + asked}
    spec = check(sampling=sampling, speculation=speculation).spec
    assert (spec.verification_policy, spec.draft_probs_transport) == (policy, transport)
    without_q = replace(OFFER, draft_transports=frozenset({DraftProbsTransport.ONE_HOT}))
    spec = check(without_q, sampling=sampling, speculation=speculation).spec
    assert (spec.verification_policy, spec.draft_probs_transport) == (policy, DraftProbsTransport.ONE_HOT)


@pytest.mark.parametrize(
    ("temperature", "policy", "usable"),
    [
        (0.0, "UNSPECIFIED", {"one_hot"}),
        (0.0, "REJECTION", {"one_hot"}),
        (1.0, "COUPLED", {"one_hot", "coupled"}),
        (1.0, "REJECTION", {"one_hot", "sparse", "full"}),
        (1.0, "BLOCK", {"one_hot", "sparse", "full"}),
    ],
)
def test_a_request_may_ask_for_any_transport_that_its_policy_can_use(
    temperature: float, policy: str, usable: set[str]
) -> None:
    without = replace(OFFER, draft_transports=frozenset({DraftProbsTransport.ONE_HOT}))
    for transport in DraftProbsTransport:
        speculation = {
            "verification_policy": POLICY + policy,
            "draft_probs_transport": f"DRAFT_PROBS_TRANSPORT_{transport.name}",
        }
        asked = {"sampling": {"temperature": temperature}, "speculation": speculation}
        if transport in usable:
            assert check(**asked).spec.draft_probs_transport is transport
            assert check(without, **asked).spec.draft_probs_transport is DraftProbsTransport.ONE_HOT
            continue
        chosen = "greedy" if temperature == 0.0 else policy.lower()
        named = f"speculation.draft_probs_transport: '{transport}' .* policy '{chosen}'.* can use: .*one_hot"
        for offer in (OFFER, without):
            with pytest.raises(InvalidArgumentError, match=named):
                check(offer, **asked)


def test_a_transport_that_is_not_offered_is_unimplemented_by_name() -> None:
    with pytest.raises(
        ServiceError, match=r"speculation.draft_probs_transport 77 is not offered; there are: one_hot"
    ):
        check(speculation={"draft_probs_transport": 77})


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({}, 4),
        ({"enabled": False}, 0),
        ({"enabled": True}, 4),
        ({"num_draft_tokens": 0}, 0),
        ({"num_draft_tokens": 8}, 8),
        ({"num_draft_tokens": 8, "enabled": False}, 0),
    ],
)
def test_drafts_a_round_are_the_requests_or_the_servers_choice(speculation: dict[str, Any], expected: int) -> None:
    assert check(speculation=speculation).num_draft_tokens == expected


def test_the_servers_choice_bows_to_the_targets_limit() -> None:
    assert check(replace(OFFER, max_draft_tokens=2)).num_draft_tokens == 2


@pytest.mark.parametrize("policy", ["REJECTION", "BLOCK"])
def test_policies_that_believe_the_draft_need_a_server_that_does(policy: str) -> None:
    wary = replace(OFFER, trusts_drafts=False)
    speculation = {"verification_policy": POLICY + policy}
    with pytest.raises(
        ServiceError, match=rf"verification_policy: '{policy.lower()}' .* greedy, coupled"
    ) as caught:
        check(wary, speculation=speculation)
    assert caught.value.code.name == "UNIMPLEMENTED"
    check(speculation=speculation)
    check(wary, speculation={**speculation, "enabled": False})
    check(wary, speculation=speculation, sampling={"temperature": 0.0})  # which is greedy
    check(wary)
