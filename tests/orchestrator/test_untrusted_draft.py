"""Whatever a draft service says or sends, greedy and coupled texts are those without it; the rest can be refused."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import numpy as np
import pytest

from engine.backends.toy_backend import HIDDEN_SIZE
from orchestrator.replica_link import HandshakeError
from orchestrator.server import OrchestratorSettings
from tandem.client import UnsupportedError
from tandem.draft.v1 import draft_pb2 as pb
from tandem.serving.channels import MAX_UNTRUSTED_MESSAGE_BYTES
from tandem.serving.item_stream import MAX_MESSAGE_ITEMS
from tests.orchestrator.fakes import until
from tests.orchestrator.hostile import HostileDraft, Lie, an_honest_face, answered, proposing
from tests.orchestrator.services import (
    VOCAB,
    all_services,
    orchestrating,
    replicas,
    similar_draft,
    token_lists,
)

PROMPTS = ["abc", "a longer prompt", "abcabcabc"]
COMMON: dict[str, Any] = {"max_tokens": 16, "num_draft_tokens": 4, "ignore_eos": True}
GREEDY: dict[str, Any] = {**COMMON, "temperature": 0.0}
COUPLED: dict[str, Any] = {**COMMON, "temperature": 0.9, "seed": 5}
WARY = OrchestratorSettings(draft_timeout_s=0.3, trusts_drafts=False)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


def q_of(*numbers: float, ids: Iterable[int] = (0,)) -> dict[str, bytes]:
    """A distribution as it travels."""
    return {
        "token_ids_u32": np.array(list(ids), dtype="<u4").tobytes(),
        "probs_f32": np.array(numbers, dtype="<f4").tobytes(),
    }


def twice_and_for_others(item: pb.ProposeItem) -> Iterable[bytes]:
    """Answers to what was never asked, and the same answer a hundred times."""
    for session, epoch, number in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (2**63, 2**31, 2**31)):
        other = pb.ProposeItem()
        other.CopyFrom(item)
        other.stamp.session_id ^= session
        other.stamp.epoch += epoch
        other.stamp.round += number
        yield answered(other, proposal={"draft_token_ids": [1, 2, 3]})
    results = [
        pb.ProposeResult(stamp=item.stamp, proposal={"draft_token_ids": [number % VOCAB]}) for number in range(100)
    ]
    yield pb.ProposeResponse(results=results).SerializeToString()


def more_than_a_message_may_have(item: pb.ProposeItem) -> Iterable[bytes]:
    yield answered(item, proposal={"draft_token_ids": [1, 2, 3]}) * (MAX_MESSAGE_ITEMS + 1)  # messages add up


def with_errors(item: pb.ProposeItem) -> Iterable[bytes]:
    yield answered(item, error={"code": item.stamp.session_id % 12, "message": "\x1b[2J" + "no " * 1000})


def one_huge_message() -> Lie:
    """More than a message between services may hold, once; then silence."""
    sent: list[bool] = []

    def lie(item: pb.ProposeItem) -> Iterable[bytes]:
        if not sent:
            sent.append(True)
            yield bytes(33 * 1024 * 1024)

    return lie


def busy(item: pb.ProposeItem) -> Iterable[bytes]:
    """Its load is absurd, and says now that it leaves and now that it does not."""
    response = pb.ProposeResponse.FromString(
        b"".join(proposing(lambda k: {"draft_token_ids": [7] * k})(item)) or b""
    )
    response.load.running = response.load.waiting = 2**32 - 1
    response.load.kv_usage = float("nan")
    response.load.total_blocks = 2**64 - 1
    response.load.draining = item.stamp.round % 2 == 1
    yield response.SerializeToString()


LIES: dict[str, Lie] = {
    "wrong tokens": proposing(lambda k: {"draft_token_ids": [0] * k}),
    "one draft too many": proposing(lambda k: {"draft_token_ids": [0] * (k + 1)}),
    "a hundred thousand drafts": proposing(lambda k: {"draft_token_ids": [0] * 100_000}),
    "thousands of drafts with a q of each": proposing(
        lambda k: {"draft_token_ids": [0] * 9000, "draft_probs": [q_of(1.0)] * 9000}
    ),
    "ids outside the vocabulary": proposing(lambda k: {"draft_token_ids": [VOCAB] * k}),
    "the largest ids": proposing(lambda k: {"draft_token_ids": [2**32 - 1] * k}),
    "a q that nobody asked for": proposing(
        lambda k: {"draft_token_ids": [0] * k, "draft_probs": [q_of(1e-6, 1 - 1e-6, ids=(0, 1))] * k}
    ),
    "a q of no numbers": proposing(lambda k: {"draft_token_ids": [0] * k, "draft_probs": [q_of(float("nan"))] * k}),
    "a q of another length": proposing(lambda k: {"draft_token_ids": [0] * k, "draft_probs": [q_of(1.0)]}),
    "a q of half numbers": proposing(
        lambda k: {"draft_token_ids": [0], "draft_probs": [{"token_ids_u32": b"\0\0\0", "probs_f32": b"\0"}]}
    ),
    "a tree": proposing(lambda k: {"draft_token_ids": [0] * k, "parents": [0] * k}),
    "garbage": lambda item: [b"\xff" * 1000],
    "nothing": lambda item: [b"", answered(item)],
    "silence": lambda item: [],
    "the wrong kind of answer": lambda item: [answered(item, closed=pb.SessionClosed())],
    "errors": with_errors,
    "answers to others, and too often": twice_and_for_others,
    "thousands of answers at once": more_than_a_message_may_have,
    "a huge message": one_huge_message(),
    "an absurd load": busy,
}


@pytest.fixture(scope="module")
def plain() -> dict[str, list[tuple[int, ...]]]:
    """The texts without drafts."""
    found: dict[str, list[tuple[int, ...]]] = {}

    async def scenario() -> None:
        async with all_services(None) as stack:
            found["greedy"] = await token_lists(stack, PROMPTS, **GREEDY)
            found["coupled"] = await token_lists(stack, PROMPTS, **COUPLED)

    run(scenario())
    return found


async def check_texts(draft: HostileDraft, expected: dict[str, list[tuple[int, ...]]]) -> None:
    """Both policies' texts with this draft service are the expected ones, and the target is left empty."""
    async with replicas(None) as (target, _):
        await draft.start()
        async with orchestrating(target, draft, WARY) as stack:
            for name, options in (("greedy", GREEDY), ("coupled", COUPLED)):
                assert await token_lists(stack, PROMPTS, **options) == expected[name]
            await stack.until_free()
        await draft.stop()


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_no_lie_changes_a_greedy_or_coupled_text(lie: Lie, plain: dict[str, list[tuple[int, ...]]]) -> None:
    draft = HostileDraft(lie)
    run(check_texts(draft, plain))
    if lie is not LIES["silence"]:
        assert draft.num_lies > 0


def test_a_name_of_a_megabyte_is_shown_in_short() -> None:
    async def scenario() -> None:
        async with replicas(None) as (target, _):
            draft = HostileDraft(LIES["wrong tokens"], an_honest_face(proposer="x" * 2**20))
            await draft.start()
            async with orchestrating(target, draft, WARY) as stack:
                (shown,) = (await stack.client.info()).drafts
            await draft.stop()
        assert shown.proposer == "x" * 200 + " ..."

    run(scenario())


@pytest.mark.parametrize(
    "need",
    [
        {"hidden_layers": [0], "hidden_size": HIDDEN_SIZE},
        {"hidden_layers": [1] * 10_000, "hidden_size": HIDDEN_SIZE},
        {"hidden_layers": [1, 2**32 - 1], "hidden_size": HIDDEN_SIZE},
        {"hidden_layers": range(1, 10), "hidden_size": HIDDEN_SIZE},
        {"hidden_layers": [1], "hidden_size": 2**32 - 1},
    ],
)
def test_one_that_wants_hidden_states_which_no_target_would_send_is_not_used(need: dict[str, Any]) -> None:
    """The target would refuse to open such a session, and the request with it."""

    async def scenario() -> None:
        async with replicas(None) as (target, _):
            draft = HostileDraft(LIES["wrong tokens"], an_honest_face(**need))
            await draft.start()
            with pytest.raises(HandshakeError, match="proposer 'friend' needs hidden states of") as caught:
                async with orchestrating(target, draft, WARY):
                    pass
            assert len(str(caught.value)) < 500
            await draft.stop()

    run(scenario())


@pytest.mark.parametrize("policy", ["rejection", "block"])
def test_policies_that_believe_the_draft_are_refused_by_name_unless_there_are_no_drafts(policy: str) -> None:
    sampled: dict[str, Any] = {**COUPLED, "verification_policy": policy}

    async def scenario() -> None:
        async with all_services(similar_draft, settings=WARY) as stack:
            with pytest.raises(UnsupportedError) as caught:
                await stack.client.complete("abc", **sampled)
            assert caught.value.code == "UNIMPLEMENTED"
            assert caught.value.message == (
                f"speculation.verification_policy: '{policy}' relies on what the draft service says of its drafts, "
                "which is not trusted here; there are: greedy, coupled; or set speculation.enabled to false"
            )
            for without in ({"speculation": False}, {"num_draft_tokens": 0}, {"temperature": 0.0}):
                result = await stack.client.complete("abc", **{**sampled, **without})
                assert result.num_completion_tokens == 16
        async with all_services(None, settings=WARY) as stack:
            assert (await stack.client.complete("abc", **sampled)).num_completion_tokens == 16
        async with all_services(similar_draft) as stack:
            assert (await stack.client.complete("abc", **sampled)).verification_policy == policy

    run(scenario())


def test_under_rejection_a_lying_q_does_change_the_text_which_is_why() -> None:
    """Each draft is token 0, and is said to come from a q that hardly ever draws it: the ratio test keeps them all."""
    lie = proposing(lambda k: {"draft_token_ids": [0] * k, "draft_probs": [q_of(1e-20, 1.0, ids=(0, 1))] * k})

    async def scenario() -> None:
        async with replicas(None) as (target, _):
            draft = HostileDraft(lie)
            await draft.start()
            async with orchestrating(target, draft) as stack:
                result = await stack.client.complete("abc", **COUPLED, verification_policy="rejection")
            await draft.stop()
        assert (
            result.token_ids.count(0) >= result.speculation.num_draft_tokens == result.speculation.num_accepted > 8
        )

    run(scenario())


def test_a_large_message_of_an_untrusted_draft_is_not_even_read() -> None:
    """Its bytes alone, all of them empty results, would hold the event loop for seconds."""
    large = pb.ProposeResponse(
        results=[pb.ProposeResult()] * (MAX_UNTRUSTED_MESSAGE_BYTES // 2)
    ).SerializeToString()
    assert len(large) >= MAX_UNTRUSTED_MESSAGE_BYTES - 1

    async def scenario() -> None:
        async with replicas(None) as (target, _), orchestrating(target, None) as alone:
            expected = await token_lists(alone, PROMPTS, **GREEDY)
            draft = HostileDraft(lambda _: [large + b"\x0a\x00"])
            await draft.start()
            try:
                async with orchestrating(target, draft, WARY) as stack:
                    assert stack.draft_link is not None
                    link = stack.draft_link
                    assert await token_lists(stack, PROMPTS, **GREEDY) == expected
                    await until(lambda: "larger than max" in link._failure)
            finally:
                await draft.stop()

    run(scenario())
