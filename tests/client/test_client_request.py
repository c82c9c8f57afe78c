"""Arguments to message: what is unset stays unset, and what the wire cannot carry is refused by name."""

from typing import Any

import numpy as np
import pytest

from tandem.client import InvalidRequestError
from tandem.client_request import build_request
from tandem.common.v1 import common_pb2
from tandem.types import LogprobsMode, VerificationPolicy


def test_nothing_said_is_nothing_set() -> None:
    request = build_request("hi", temperature=None, seed=None)
    assert request.WhichOneof("prompt") == "text"
    assert not request.sampling.ListFields()
    assert not request.stopping.ListFields()
    assert not request.speculation.ListFields()
    assert not request.HasField("logprobs")
    assert not request.HasField("n")


def test_numbers_of_numpy_are_numbers() -> None:
    request = build_request(
        "hi", seed=np.uint64(7), temperature=np.float32(0.5), ignore_eos=np.True_, stop_token_ids=np.array([3])
    )  # type: ignore[arg-type]
    assert (request.sampling.seed, request.sampling.temperature) == (7, 0.5)
    assert request.stopping.ignore_eos
    assert list(request.stopping.stop_token_ids) == [3]


def test_what_is_no_finite_number_travels_to_be_refused_with_the_limit_of_its_field() -> None:
    for value in (float("inf"), float("nan"), 10**400):
        assert not np.isfinite(build_request("hi", temperature=value).sampling.temperature)


def test_zero_is_a_value() -> None:
    request = build_request("hi", temperature=0, seed=0, top_k=0, num_draft_tokens=0, speculation=False)
    for name in ("temperature", "seed", "top_k"):
        assert request.sampling.HasField(name)
    assert request.speculation.HasField("num_draft_tokens")
    assert request.speculation.HasField("enabled")
    assert not request.speculation.enabled


def test_logprobs_are_asked_for_with_or_without_a_list_and_a_mode() -> None:
    assert not build_request("hi", logprobs=False).HasField("logprobs")
    chosen_only = build_request("hi", logprobs=True)
    assert chosen_only.HasField("logprobs")
    assert not chosen_only.logprobs.ListFields()
    assert build_request("hi", logprobs=True, top_logprobs=0).HasField("logprobs")
    for mode in ("processed", LogprobsMode.PROCESSED):
        options = build_request("hi", logprobs=True, top_logprobs=5, logprobs_mode=mode).logprobs
        assert (options.num_top, options.mode) == (5, common_pb2.LOGPROBS_MODE_PROCESSED)


def test_prompts_are_text_ids_or_messages() -> None:
    assert build_request("").WhichOneof("prompt") == "text"
    assert list(build_request([3, 4]).tokens.ids) == [3, 4]
    assert list(build_request(np.array([3, 4])).tokens.ids) == [3, 4]  # type: ignore[arg-type]
    assert build_request([]).WhichOneof("prompt") == "tokens"
    chat = build_request([{"role": "user", "content": "hi"}]).chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [("user", "hi")]


def test_every_option_has_its_field() -> None:
    request = build_request(
        "hi",
        logit_bias={5: -1.5},
        bad_token_ids=(1, 2),
        allowed_token_ids=[3],
        max_tokens=9,
        min_tokens=2,
        stop="x",
        stop_token_ids={7},
        ignore_eos=True,
        include_stop_in_output=True,
        verification_policy="rejection",
        draft_probs_transport="full",
        n=3,
        sample_index=5,
        request_id="mine",
        timeout=1.0,
    )
    assert dict(request.sampling.logit_bias) == {5: -1.5}
    assert list(request.sampling.bad_token_ids) == [1, 2]
    assert list(request.sampling.allowed_token_ids) == [3]
    stopping = request.stopping
    assert (stopping.max_tokens, stopping.min_tokens, list(stopping.stop)) == (9, 2, ["x"])
    assert list(stopping.stop_token_ids) == [7]
    assert stopping.ignore_eos
    assert stopping.include_stop_in_output
    assert request.speculation.verification_policy == common_pb2.VERIFICATION_POLICY_REJECTION
    assert request.speculation.draft_probs_transport == common_pb2.DRAFT_PROBS_TRANSPORT_FULL
    assert request.request_id == "mine"
    assert (request.n, request.sample_index) == (3, 5)
    assert list(build_request("hi", stop=["x", "y"]).stopping.stop) == ["x", "y"]
    policy = build_request("hi", verification_policy=VerificationPolicy.GREEDY).speculation.verification_policy
    assert policy == common_pb2.VERIFICATION_POLICY_GREEDY


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("hi", {"max_tokens": -1}, r"max_tokens: -1 is outside \[0, 4294967295\]"),
        ("hi", {"max_tokens": True}, "max_tokens: True is not an integer"),
        ("hi", {"max_tokens": "9"}, "max_tokens: '9' is not an integer"),
        ("hi", {"seed": -1}, r"seed: -1 is outside \[0, 18446744073709551615\]"),
        ("hi", {"seed": 2**64}, r"seed: 18446744073709551616 is outside \[0, 18446744073709551615\]"),
        ("hi", {"seed": 1.5}, "seed: 1.5 is not an integer"),
        ("hi", {"priority": 2**31}, r"priority: 2147483648 is outside \[-2147483648, 2147483647\]"),
        ("hi", {"temperature": "0.5"}, "temperature: '0.5' is not a number"),
        ("hi", {"temperature": [1]}, r"temperature: \[1\] is not a number"),
        ("hi", {"temperature": 1e39}, r"temperature: 1e\+39 is outside \[-3.40282e\+38, 3.40282e\+38\]"),
        ("hi", {"logit_bias": {-1: 1.0}}, r"logit_bias: -1 is outside \[0, 4294967295\]"),
        ("hi", {"logit_bias": {7: "x"}}, r"logit_bias\[7\]: 'x' is not a number"),
        ("hi", {"logit_bias": [7]}, r"logit_bias: \[7\] is not a mapping from token ids to numbers"),
        ("hi", {"stop_token_ids": [5, 2**32]}, r"stop_token_ids\[1\]: 4294967296 is outside \[0, 4294967295\]"),
        ("hi", {"bad_token_ids": 5}, "bad_token_ids: 5 is not a list of token ids"),
        ("hi", {"allowed_token_ids": "57"}, "allowed_token_ids: '57' is not a list of token ids"),
        ("hi", {"stop": 5}, "stop: 5 is not a list of texts"),
        ("hi", {"stop": ["x", 5]}, r"stop\[1\]: 5 is not text"),
        ("hi", {"request_id": 5}, "request_id: 5 is not text"),
        ("hi", {"ignore_eos": "no"}, "ignore_eos: 'no' is neither True nor False"),
        ("hi", {"speculation": 0}, "speculation: 0 is neither True nor False"),
        ("hi", {"verification_policy": ["greedy"]}, r"verification_policy: \['greedy'\] is not offered; there are"),
        ("hi", {"n": -1}, r"n: -1 is outside \[0, 4294967295\]"),
        ("hi", {"n": 1.5}, "n: 1.5 is not an integer"),
        ("hi", {"sample_index": 2**32}, r"sample_index: 4294967296 is outside \[0, 4294967295\]"),
        ("hi", {"timeout": -1}, r"timeout: -1.0 is outside \[0, 1e\+06\]"),
        ("hi", {"timeout": float("nan")}, r"timeout: nan is outside \[0, 1e\+06\]"),
        ("hi", {"timeout": "5"}, "timeout: '5' is not a number"),
        ("hi", {"draft_probs_transport": "foo"}, "draft_probs_transport: 'foo' is not offered; there are: one_hot"),
        ([-1], {}, r"prompt\[0\]: -1 is outside \[0, 4294967295\]"),
        ([1, "x"], {}, r"prompt\[1\]: 'x' is not an integer"),
        ("hi \ud800", {}, r"prompt: character 3, '\\ud800', has no UTF-8 form"),
        ([{"role": "user"}], {}, r"prompt\[0\]"),
        ("hi", {"logprobs": 5}, "logprobs: 5 is neither True nor False; top_logprobs takes the number"),
        ("hi", {"top_logprobs": 5}, "top_logprobs: needs logprobs=True"),
        ("hi", {"logprobs": False, "top_logprobs": 0}, "top_logprobs: needs logprobs=True"),
        ("hi", {"logprobs_mode": "raw"}, "logprobs_mode: needs logprobs=True"),
        ("hi", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("hi", {"logprobs": True, "logprobs_mode": "x"}, "logprobs_mode: 'x' is not offered; there are: raw, proc"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(prompt: Any, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^INVALID_ARGUMENT: {field}"):
        build_request(prompt, **options)


def test_an_unknown_option_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="unknown option 'temprature'; there are: temperature"):
        build_request("hi", temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), None, 5, {"role": "user", "content": "x"}])
def test_prompts_of_no_known_kind_are_refused_by_type(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"prompt: {type(prompt).__name__} is neither text, nor a list"):
        build_request(prompt)


@pytest.mark.parametrize("content", [None, 5, [{"type": "text", "text": "x"}]])
def test_chat_messages_are_text(content: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt\[0\]\.content: .* is not text"):
        build_request([{"role": "user", "content": content}])


@pytest.mark.parametrize("name", ["blocks", "foo"])
def test_policies_that_are_not_offered_are_named_with_those_that_are(name: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"'{name}' is not offered; there are: greedy, coupled, rejection, block"
    ):
        build_request("x", verification_policy=name)
