"""Bytes and messages that nobody would send, to all three servers: no crash, no hang, and no INTERNAL.

A bad message or item has a status or a typed error of its own; afterwards the server serves as before, and nothing of
what was sent is left on it.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import grpc
import pytest

from tandem.client import TandemClient
from tandem.draft.v1 import draft_pb2
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.serving.channels import open_channel
from tandem.target.v1 import target_pb2
from tests.fuzz.random_messages import fill, random_bytes
from tests.orchestrator.services import Stack, all_services, self_draft

SHARDS = [0, *(pytest.param(shard, marks=pytest.mark.slow) for shard in range(1, 8))]
INPUTS = {"orchestrator": 1500, "target": 7000, "draft": 7000}  # of a shard
ITEMS = 64  # of a message
HANG_S = 60.0

_STREAMS = {
    "target": ("/tandem.target.v1.TargetService/Verify", target_pb2.VerifyRequest, target_pb2.VerifyResponse),
    "draft": ("/tandem.draft.v1.DraftService/Propose", draft_pb2.ProposeRequest, draft_pb2.ProposeResponse),
}
_GENERATE = "/tandem.orchestrator.v1.OrchestratorService/Generate"
_BAD_INPUT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.FAILED_PRECONDITION,  # numerics that nothing here has
    grpc.StatusCode.CANCELLED,
}
_ERROR_INTERNAL = "INTERNAL"


def as_it_is(data: bytes) -> bytes:
    return data


async def check_serves(stack: Stack, expected: tuple[int, ...]) -> None:
    """As if nothing had happened, and with nothing left."""
    result = await stack.client.complete("abc", max_tokens=12, ignore_eos=True, temperature=0.0)
    assert result.token_ids == expected
    await stack.until_free()


@pytest.mark.parametrize("shard", SHARDS)
def test_requests_of_applications(shard: int) -> None:
    rng = random.Random(f"orchestrator/{shard}")
    seen: Counter[str] = Counter()

    async def send(call: Any, data: bytes) -> None:
        """One call, left after its first chunks; its status is OK or says that the input is bad."""
        running = call(data, timeout=HANG_S)
        try:
            for _ in range(3):
                if await running.read() is grpc.aio.EOF:
                    break
            running.cancel()
            seen["served"] += 1
        except grpc.aio.AioRpcError as error:
            seen[_name_of(error, data)] += 1

    async def scenario() -> None:
        async with all_services(self_draft) as stack, open_channel(stack.client.address) as channel:
            expected = (
                await stack.client.complete("abc", max_tokens=12, ignore_eos=True, temperature=0.0)
            ).token_ids
            call = channel.unary_stream(_GENERATE, as_it_is, as_it_is)
            for _ in range(INPUTS["orchestrator"] // 16):
                inputs = [_request(rng) for _ in range(16)]
                await asyncio.gather(*(send(call, data) for data in inputs))
            await check_serves(stack, expected)

    asyncio.run(asyncio.wait_for(scenario(), 10 * HANG_S))
    assert seen["served"]
    assert seen["INVALID_ARGUMENT"]


def _request(rng: random.Random) -> bytes:
    """Bytes, a message of anything, or a good request of which a part is anything."""
    kind = rng.random()
    if kind < 0.2:
        return random_bytes(rng)
    if kind < 0.5:
        return fill(pb.GenerateRequest(), rng).SerializeToString()
    request = pb.GenerateRequest(text="abc", stopping=pb.StoppingCriteria(max_tokens=4))
    part = rng.choice((request.sampling, request.stopping, request.speculation, request.logprobs, request))
    return fill(part, rng, 0.15) and request.SerializeToString()


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_items_of_a_stream(role: str, shard: int) -> None:
    rng = random.Random(f"{role}/{shard}")
    method, request_type, response_type = _STREAMS[role]
    seen: Counter[str] = Counter()

    async def scenario() -> None:
        async with all_services(self_draft) as stack:
            expected = (
                await stack.client.complete("abc", max_tokens=12, ignore_eos=True, temperature=0.0)
            ).token_ids
            replica = stack.target if role == "target" else stack.draft
            assert replica is not None
            async with open_channel(replica.address) as channel:
                stream = channel.stream_stream(method, as_it_is, response_type.FromString)
                for _ in range(INPUTS[role] // (4 * ITEMS)):
                    await _play(stream, [_message(request_type, rng) for _ in range(4)], seen)
            await check_serves(stack, expected)

    asyncio.run(asyncio.wait_for(scenario(), 10 * HANG_S))
    assert not seen[_ERROR_INTERNAL], seen
    assert len(seen) > 2  # it was not all refused alike


def _name_of(error: grpc.aio.AioRpcError, sent: object) -> str:
    """The status by name; it must say that the input is bad.

    A client whose write fails because the server has ended the stream already is told so in gRPC's own words.
    """
    if error.details() == "Internal error from Core":
        return "ended while it was written"
    assert error.code() in _BAD_INPUT, (error.code(), error.details(), sent)
    return str(error.code().name)


async def _play(stream: Any, messages: Sequence[bytes], seen: Counter[str]) -> None:
    """One stream with these messages; every answer is looked at until the server has said all it has to say."""

    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    try:
        async for response in stream(requests(), timeout=HANG_S):
            for result in response.results:
                outcome = result.WhichOneof("outcome")
                seen[_code_name(result.error) if outcome == "error" else str(outcome)] += 1
    except grpc.aio.AioRpcError as error:
        seen[_name_of(error, messages)] += 1


def _code_name(error: Any) -> str:
    return str(error.DESCRIPTOR.fields_by_name["code"].enum_type.values_by_number[error.code].name).removeprefix(
        "ITEM_ERROR_CODE_"
    )


def _message(request_type: Any, rng: random.Random) -> bytes:
    """Bytes now and then; else items of anything, of few sessions, so that they meet each other."""
    if rng.random() < 0.05:
        return random_bytes(rng)
    request = request_type()
    for _ in range(ITEMS):
        item = request.items.add()
        fill(item, rng, rng.choice((0.2, 0.5, 0.8)))
        if rng.random() < 0.7:
            _make_likely(item, rng)
    return bytes(request.SerializeToString())


def _make_likely(item: Any, rng: random.Random) -> None:
    """A stamp that another item may have, and an op whose parts could be right."""
    item.stamp.session_id = rng.randint(1, 3)
    item.stamp.epoch = rng.randint(0, 2)
    item.stamp.round = rng.randint(0, 3)
    if item.WhichOneof("op") == "open" and rng.random() < 0.8:
        session = item.open
        session.Clear()
        session.token_ids.extend((1, 2, 3))
        session.prompt_len, session.max_tokens = 3, rng.randint(1, 8)
        session.sampling.temperature, session.sampling.seed = 0.0, 1
        session.verification_policy = rng.randint(1, 4)
        session.draft_probs_transport = rng.randint(1, 4)
        item.stamp.committed_len = 3
        fill(session.sampling, rng, 0.1)


def test_every_field_of_every_request_is_reached() -> None:
    """The messages are as random as they seem: nothing of a request is left out for good."""
    rng = random.Random(1)
    for kind in (pb.GenerateRequest, target_pb2.VerifyRequest, draft_pb2.ProposeRequest):
        reached: set[str] = set()
        for _ in range(400):
            reached |= set(_fields(fill(kind(), rng), 0))
        missing = set(_all_fields(kind.DESCRIPTOR, 0)) - reached
        assert not missing


def _fields(message: Any, depth: int) -> Iterable[str]:
    for field, value in message.ListFields():
        yield field.full_name
        if field.message_type is None or field.message_type.GetOptions().map_entry or depth > 4:
            continue
        for part in value if field.is_repeated else (value,):
            yield from _fields(part, depth + 1)


def _all_fields(descriptor: Any, depth: int) -> Iterable[str]:
    for field in descriptor.fields:
        yield field.full_name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry and depth < 4:
            yield from _all_fields(field.message_type, depth + 1)


def test_what_is_no_message_at_all_ends_the_call_and_nothing_else() -> None:
    async def scenario() -> None:
        async with all_services(self_draft) as stack:
            address = stack.client.address
            host, _, port = address.rpartition(":")
            rng = random.Random(3)
            for _ in range(50):  # not even HTTP/2
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(rng.randbytes(200))
                await writer.drain()
                writer.close()
            async with TandemClient(address) as client:
                assert (await client.complete("abc", max_tokens=3, ignore_eos=True)).num_completion_tokens == 3

    asyncio.run(asyncio.wait_for(scenario(), HANG_S))
