"""The link: items gather into messages, answers find their waiters, a lost stream fails them and comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from orchestrator.breaker import Backoff
from orchestrator.replica_api import TARGET_API, ReplicaInfo
from orchestrator.replica_link import HandshakeError, LinkLostError, ReplicaLink, TargetLink
from orchestrator.replica_stream import PATIENCE, StreamPatience
from tandem.common.v1 import common_pb2
from tandem.serving import batches
from tandem.serving.item_stream import MAX_MESSAGE_ITEMS
from tandem.target.v1 import target_pb2 as pb
from tandem.target.v1 import target_pb2_grpc
from tandem.types import ItemError
from tests.orchestrator.fakes import until

QUICKLY = Backoff(0.005, 0.02)
Answers = Callable[[list[pb.VerifyItem]], list[pb.VerifyResult]]


def item(round_number: int, session_id: int = 1) -> pb.VerifyItem:
    stamp = common_pb2.Stamp(session_id=session_id, epoch=1, round=round_number)
    return pb.VerifyItem(stamp=stamp, verify=pb.VerifyStep())


def verdict(to: pb.VerifyItem, token_id: int = 7) -> pb.VerifyResult:
    return pb.VerifyResult(stamp=to.stamp, verdict=pb.Verdict(token_ids=[token_id]))


def echo(items: list[pb.VerifyItem]) -> list[pb.VerifyResult]:
    return [verdict(one, one.stamp.round) for one in items]


class FakeTarget(target_pb2_grpc.TargetServiceServicer):
    """Answers by a function; remembers each message's items; `hang_up` ends its streams."""

    def __init__(self, answers: Answers = echo) -> None:
        self.answers = answers
        self.messages: list[list[pb.VerifyItem]] = []
        self.num_streams = 0
        self.num_ended_by_peer = 0
        self.push: asyncio.Queue[pb.VerifyResponse | None] = asyncio.Queue()
        self.model = common_pb2.ModelInfo(protocol_version=1, vocab_size=8)
        self.load = common_pb2.Load(running=1)

    def hang_up(self) -> None:
        self.push.put_nowait(None)

    async def GetInfo(self, request: Any, context: Any) -> pb.GetInfoResponse:
        return pb.GetInfoResponse(model=self.model, load=self.load)

    async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.VerifyResponse]:
        self.num_streams += 1
        push = self.push
        reader = asyncio.create_task(self._read(request_iterator, push))
        try:
            while (response := await push.get()) is not None:
                yield response
        finally:
            reader.cancel()
            self.push = asyncio.Queue()  # what was meant for this stream is not for the next

    async def _read(self, requests: Any, push: "asyncio.Queue[pb.VerifyResponse | None]") -> None:
        async for request in requests:
            self.messages.append(list(request.items))
            results = self.answers(list(request.items))
            push.put_nowait(pb.VerifyResponse(results=results, load=common_pb2.Load(running=5)))
        self.num_ended_by_peer += 1
        push.put_nowait(None)


@asynccontextmanager
async def linked(
    target: FakeTarget,
    check: Callable[[ReplicaInfo], None] = lambda _: None,
    patience: StreamPatience = PATIENCE,
    backoff: Backoff = QUICKLY,
) -> AsyncIterator[TargetLink]:
    """A started link to a served fake."""
    server = grpc.aio.server(options=[("grpc.http2.bdp_probe", 0)])  # windows stay as small as they begin
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link: TargetLink = ReplicaLink(TARGET_API, f"127.0.0.1:{port}", check, backoff, patience)
    link.start()
    try:
        yield link
    finally:
        await link.close()
        await server.stop(0)


async def answer(future: "asyncio.Future[pb.VerifyResult]") -> pb.VerifyResult:
    await asyncio.wait([future], timeout=20)
    return future.result()


def test_each_connection_and_each_loss_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> str:
        target = FakeTarget()
        async with linked(target) as link:
            await link.wait_checked(10)
            target.hang_up()
            await until(lambda: link.generation == 2)
            return link.address

    with caplog.at_level("INFO"):
        address = asyncio.run(scenario())
    lines = [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "orchestrator.replica_link"]
    assert lines == [
        ("INFO", f"target service at {address} is connected"),
        ("WARNING", f"target service at {address} is lost: the stream was ended by the other side"),
        ("INFO", f"target service at {address} is connected again"),
    ]


def test_items_of_one_turn_travel_in_one_message_and_each_gets_its_own_answer() -> None:
    async def scenario() -> None:
        target = FakeTarget()
        async with linked(target) as link:
            await link.wait_checked(10)
            futures = [link.request(item(1, session_id)) for session_id in range(100)]
            answers = [await answer(future) for future in futures]
        assert [result.stamp.session_id for result in answers] == list(range(100))
        assert [len(items) for items in target.messages] == [100]
        assert link.load.running == 5

    asyncio.run(scenario())


def test_messages_are_bounded_in_items_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_BATCH_ITEMS", 8)
    monkeypatch.setattr(batches, "MAX_BATCH_BYTES", 200)

    async def scenario() -> None:
        target = FakeTarget()
        async with linked(target) as link:
            await link.wait_checked(10)
            futures = [link.request(item(1, session_id)) for session_id in range(20)]
            large = item(2)
            large.verify.proposal.draft_token_ids.extend(range(200, 500))
            futures += [link.request(large), link.request(item(3))]
            for future in futures:
                await answer(future)
        assert [len(items) for items in target.messages] == [8, 8, 4, 1, 1]

    asyncio.run(scenario())


def test_an_item_that_no_message_holds_fails_by_name_and_the_stream_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "MAX_ITEM_BYTES", 200)

    async def scenario() -> None:
        target = FakeTarget()
        async with linked(target) as link:
            await link.wait_checked(10)
            large = item(2)
            large.verify.proposal.draft_token_ids.extend(range(200, 500))
            futures = [link.request(one) for one in (item(1), large, item(3))]
            assert (await answer(futures[0])).verdict.token_ids == [1]
            with pytest.raises(ItemError, match=r"a VerifyItem of \d+ bytes is more than the limit of 200 bytes"):
                await answer(futures[1])
            assert (await answer(futures[2])).verdict.token_ids == [3]
            assert (link.is_up, link.generation) == (True, 1)
        assert [one.stamp.round for items in target.messages for one in items] == [1, 3]

    asyncio.run(scenario())


def test_opens_with_long_prompts_travel_in_several_messages() -> None:
    async def scenario() -> None:
        target = FakeTarget()
        async with linked(target) as link:
            await link.wait_checked(10)
            items = []
            for session_id in range(40):
                opening = pb.VerifyItem(stamp=item(0, session_id).stamp)
                opening.open.token_ids.extend([151_000] * 100_000)
                items.append(opening)
            for future in [link.request(one) for one in items]:
                await answer(future)
        assert [len(items) for items in target.messages] == [3] * 13 + [1]
        assert sum(one.ByteSize() for one in items) > 40 * 300_000

    asyncio.run(scenario())


def test_answers_nobody_waits_for_are_counted_and_dropped() -> None:
    def answers(items: list[pb.VerifyItem]) -> list[pb.VerifyResult]:
        stranger = verdict(item(9, session_id=999))
        closed = pb.VerifyResult(stamp=stranger.stamp, closed=pb.SessionClosed())
        return [stranger, closed, *echo(items), *echo(items)]

    async def scenario() -> None:
        async with linked(FakeTarget(answers)) as link:
            await link.wait_checked(10)
            assert (await answer(link.request(item(1)))).verdict.token_ids == [1]
            await until(lambda: link.answers.num_dropped == 2)
            assert (await answer(link.request(item(2)))).verdict.token_ids == [2]

    asyncio.run(scenario())


def test_a_forgotten_answer_comes_late_and_harms_nobody() -> None:
    async def scenario() -> None:
        target = FakeTarget(lambda items: [])
        async with linked(target) as link:
            await link.wait_checked(10)
            future = link.request(item(1))
            await until(lambda: len(target.messages) == 1)
            link.answers.forget((1, 1, 1))
            assert future.cancelled()
            target.push.put_nowait(pb.VerifyResponse(results=echo([item(1)])))
            await until(lambda: link.answers.num_dropped == 1)
            assert link.is_up

    asyncio.run(scenario())


def test_a_message_of_more_results_than_one_may_have_is_not_looked_at_and_its_sender_is_kept_away_from() -> None:
    async def scenario() -> None:
        target = FakeTarget(lambda items: echo(items) * (MAX_MESSAGE_ITEMS + 1))
        async with linked(target) as link:
            await link.wait_checked(10)
            for generation in (1, 2):
                future = link.request(item(1))
                with pytest.raises(LinkLostError):
                    await answer(future)
                await until(lambda: "it sent 4097 results in one message, more than the limit of" in link._failure)
                assert (link.answers.num_dropped, link.breaker.is_open) == (0, True)
                await until(lambda then=generation: link.generation > then and link.is_up)  # and it is tried again
            target.answers = echo
            assert (await answer(link.request(item(2)))).verdict.token_ids == [2]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_waits_grow_for_a_replica_that_misbehaves_again_and_not_for_one_that_is_lost_again() -> None:
    async def scenario() -> None:
        target, asked = FakeTarget(), []

        class Noted(Backoff):
            def wait_s(self, num_failures: int) -> float:
                asked.append(num_failures)
                return 0.0

        async with linked(target, backoff=Noted()) as link:
            flood = pb.VerifyResponse(results=[pb.VerifyResult()] * (MAX_MESSAGE_ITEMS + 1))
            for generation, last in enumerate((flood, flood, flood, None, None), start=1):
                await until(lambda wanted=generation: link.generation == wanted and link.is_up)
                target.push.put_nowait(last)
            await until(lambda: link.generation == 6)
        assert asked == [1, 2, 3, 1, 1]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_other_tasks_have_their_turn_while_the_results_of_a_large_message_are_taken() -> None:
    async def scenario() -> None:
        num_turns, seen = 0, []

        async def count_turns() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        target = FakeTarget()
        async with linked(target) as link:
            await link.wait_checked(10)
            link.answers.take = lambda _: seen.append(num_turns)  # type: ignore[method-assign]
            counting = asyncio.create_task(count_turns())
            target.push.put_nowait(pb.VerifyResponse(results=echo([item(1)]) * MAX_MESSAGE_ITEMS))
            await until(lambda: len(seen) == MAX_MESSAGE_ITEMS)
            counting.cancel()
        assert len(set(seen)) == MAX_MESSAGE_ITEMS // batches.MAX_BATCH_ITEMS

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_lost_stream_fails_what_was_asked_on_it_and_a_new_generation_takes_over() -> None:
    async def scenario() -> None:
        target = FakeTarget(lambda items: [])
        async with linked(target) as link:
            await link.wait_checked(10)
            assert link.generation == 1
            future = link.request(item(1))
            await until(lambda: len(target.messages) == 1)
            target.hang_up()
            with pytest.raises(LinkLostError, match=r"target service at 127\.0\.0\.1"):
                await answer(future)
            await link.wait_checked(10)
            assert link.generation == 2
            target.answers = echo
            assert (await answer(link.request(item(2)))).verdict.token_ids == [2]

    asyncio.run(scenario())


def test_without_a_stream_items_are_refused_at_once_by_name() -> None:
    async def scenario() -> None:
        link: TargetLink = ReplicaLink(TARGET_API, "127.0.0.1:1", backoff=Backoff(0.005, 0.02))
        link.start()
        with pytest.raises(LinkLostError, match=r"target service at 127\.0\.0\.1:1 is not reachable"):
            link.request(item(1))
        with pytest.raises(LinkLostError, match=r"is not reachable: .*[Cc]onnection refused"):
            await link.wait_checked(0.3)
        await link.close()

    asyncio.run(scenario())


def test_a_replica_the_check_refuses_is_not_used_and_the_refusal_is_told() -> None:
    def check(info: ReplicaInfo) -> None:
        raise HandshakeError(f"vocabulary of {info.model.vocab_size}")

    async def scenario() -> None:
        target = FakeTarget()
        async with linked(target, check) as link:
            with pytest.raises(HandshakeError, match="vocabulary of 8"):
                await link.wait_checked(10)
            assert not link.is_up
        assert target.num_streams == 0

    asyncio.run(scenario())


def test_the_handshake_is_repeated_at_every_connect() -> None:
    seen: list[int] = []

    async def scenario() -> None:
        target = FakeTarget()
        async with linked(target, lambda info: seen.append(info.model.vocab_size)) as link:
            await link.wait_checked(10)
            target.model.vocab_size = 9
            target.hang_up()
            await until(lambda: link.generation == 2)
            assert link.info is not None
            assert link.info.model.vocab_size == 9

    asyncio.run(scenario())
    assert seen == [8, 9]


def test_closing_writes_what_is_queued_and_half_closes_the_stream() -> None:
    async def scenario() -> None:
        target = FakeTarget()
        async with linked(target) as link:
            await link.wait_checked(10)
            link.send(item(1))
            await link.close()
        assert [len(items) for items in target.messages] == [1]
        assert target.num_ended_by_peer == 1

    asyncio.run(scenario())


def test_waits_between_attempts_grow_to_a_limit() -> None:
    backoff = Backoff(0.1, 1.0)
    for num_failures, longest in ((1, 0.15), (2, 0.3), (3, 0.6), (4, 1.2), (50, 1.5)):
        waits = [backoff.wait_s(num_failures) for _ in range(50)]
        assert longest / 3 <= min(waits) <= max(waits) <= longest


def test_a_stream_on_which_nothing_comes_is_given_up_and_says_so() -> None:
    async def scenario() -> None:
        target = FakeTarget(lambda _: [])
        async with linked(target, patience=StreamPatience(silence_s=0.2)) as link:
            await link.wait_checked(10)
            future = link.request(item(1))
            await asyncio.wait([future], timeout=20)
            with pytest.raises(LinkLostError):
                future.result()
            assert "nothing came from it for 0.2 s" in link.why_not()
            await until(lambda: link.generation == 2)  # and it is tried again

    asyncio.run(scenario())


def test_a_stream_of_which_nothing_is_taken_is_given_up_and_says_so() -> None:
    class Deaf(FakeTarget):
        """Says that it is there, and reads nothing."""

        async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.VerifyResponse]:
            self.num_streams += 1
            while True:
                yield pb.VerifyResponse(load=self.load)
                await asyncio.sleep(0.02)

    async def scenario() -> None:
        target = Deaf()
        async with linked(target, patience=StreamPatience(stall_s=0.4)) as link:
            await link.wait_checked(10)
            await asyncio.sleep(0.8)
            assert (link.is_up, link.generation) == (True, 1)  # with nothing to take, taking nothing is no fault
            long = item(1)
            long.open.token_ids.extend([1 << 31] * (1 << 20))
            futures = [link.request(long)]
            while not futures[0].done():
                futures.append(link.request(item(len(futures) + 1)))
                await asyncio.sleep(0.01)
            await asyncio.wait(futures, timeout=20)
            assert {type(future.exception()) for future in futures} == {LinkLostError}
            assert "it took nothing of what was sent for 0.4 s" in link._failure
            await until(lambda: link.generation == 2)  # and it is tried again

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_replica_whose_engine_is_frozen_loses_its_sessions_and_is_not_used_until_it_computes_again() -> None:
    async def scenario() -> None:
        target = FakeTarget(lambda _: [])
        async with linked(target) as link:
            await link.wait_checked(10)
            future = link.request(item(1))
            target.load = common_pb2.Load(frozen=True)
            target.push.put_nowait(pb.VerifyResponse(load=target.load))
            await asyncio.wait([future], timeout=20)
            with pytest.raises(LinkLostError):
                future.result()
            await until(lambda: "its engine is frozen" in link.why_not())
            assert not link.is_up
            target.load = common_pb2.Load()
            await link.wait_checked(10)

    asyncio.run(scenario())
