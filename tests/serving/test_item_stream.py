"""Results on their way: each is written once, in order, in batches; closing ends the stream after the rest."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.draft.v1 import draft_pb2 as pb
from tandem.serving import batches
from tandem.serving.item_stream import MAX_MESSAGE_ITEMS, MAX_UNSENT, Outbox, serve_items
from tandem.validation import InvalidArgumentError


def _message(session_id: int) -> pb.ProposeResult:
    return pb.ProposeResult(stamp={"session_id": session_id}, proposal={"draft_token_ids": range(session_id)})


def _session_ids(results: list[pb.ProposeResult]) -> list[int]:
    return [result.stamp.session_id for result in results]


def test_results_put_in_one_turn_travel_as_one_batch_and_close_flushes_the_rest() -> None:
    async def scenario() -> list[list[int]]:
        outbox: Outbox[int] = Outbox()
        batches: list[list[int]] = []

        async def drain() -> None:
            async for batch in outbox.batches():
                batches.append(batch)

        reader = asyncio.create_task(drain())
        outbox.put(1)
        outbox.put(2)
        while not batches:
            await asyncio.sleep(0)
        outbox.put(3)
        outbox.close()
        outbox.put(4)  # after the end: dropped
        await asyncio.wait_for(reader, 5)
        return batches

    assert asyncio.run(scenario()) == [[1, 2], [3]]


def test_a_peer_without_results_has_heartbeats_and_results_do_not_wait_for_them() -> None:
    async def scenario() -> list[list[int]]:
        outbox: Outbox[int] = Outbox(heartbeat_s=0.02)
        batches: list[list[int]] = []
        async for batch in outbox.batches():
            batches.append(batch)
            if len(batches) == 3:
                outbox.put(1)
            if batch:
                outbox.close()
        return batches

    batches = asyncio.run(asyncio.wait_for(scenario(), 20))
    assert batches[:3] == [[], [], []]
    assert batches[-1] == [1]


def test_an_outbox_closed_while_empty_ends_at_once() -> None:
    async def scenario() -> list[list[int]]:
        outbox: Outbox[int] = Outbox()
        outbox.close()
        return [batch async for batch in outbox.batches()]

    assert asyncio.run(asyncio.wait_for(scenario(), 5)) == []


def test_a_fault_of_reading_ends_the_stream_after_the_answers_that_are_due_and_frees_the_sessions() -> None:
    async def requests() -> AsyncIterator[pb.ProposeRequest]:
        yield pb.ProposeRequest(items=[pb.ProposeItem(stamp={"session_id": 1})])
        raise ConnectionError("lost")

    async def scenario() -> None:
        taken, responses, ended = [], [], asyncio.Event()
        outbox: Outbox[int] = Outbox()
        stream = serve_items(
            requests(),
            lambda item, stamp, arrived_s, deadline_s: taken.append(stamp.session_id),
            outbox,
            _message,
            _session_ids,
            settle=lambda: bool(responses),
            end=ended.set,
        )
        asyncio.get_running_loop().call_later(0.01, outbox.put, 7)
        responses.append(await anext(stream))
        with pytest.raises(ConnectionError, match="lost"):
            await anext(stream)
        assert (taken, responses, ended.is_set()) == ([1], [[7]], True)

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_results_that_one_message_cannot_hold_travel_in_several_and_one_that_fits_none_becomes_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batches, "MAX_BATCH_BYTES", 100)
    monkeypatch.setattr(batches, "MAX_ITEM_BYTES", 150)

    async def requests() -> AsyncIterator[pb.ProposeRequest]:
        await asyncio.Event().wait()
        yield pb.ProposeRequest()

    async def scenario() -> list[list[pb.ProposeResult]]:
        outbox: Outbox[int] = Outbox()
        for session_id in (35, 40, 5, 10, 120, 200):
            outbox.put(session_id)
        outbox.close()
        stream = serve_items(
            requests(), lambda *_: None, outbox, _message, list, settle=lambda: False, end=lambda: None
        )
        return [response async for response in stream]

    responses = asyncio.run(asyncio.wait_for(scenario(), 5))
    assert [_session_ids(response) for response in responses] == [[35, 40], [5, 10], [120], [200]]
    (refused,) = responses[-1]
    assert refused.WhichOneof("outcome") == "error"
    assert "is more than the limit of 150 bytes" in refused.error.message
    assert refused.error.message in caplog.text


def _requests(*sizes: int) -> AsyncIterator[pb.ProposeRequest]:
    """Messages of so many items."""

    async def made() -> AsyncIterator[pb.ProposeRequest]:
        for size in sizes:
            yield pb.ProposeRequest(items=[pb.ProposeItem()] * size)

    return made()


def test_others_have_their_turn_while_a_message_of_many_items_is_taken() -> None:
    async def scenario() -> int:
        turns, taken = 0, 0

        def take(*_: object) -> None:
            nonlocal taken
            taken += 1

        async def count_turns() -> None:
            nonlocal turns
            while taken < MAX_MESSAGE_ITEMS:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        outbox: Outbox[int] = Outbox()
        stream = serve_items(
            _requests(MAX_MESSAGE_ITEMS), take, outbox, _message, list, settle=lambda: True, end=lambda: None
        )
        assert [response async for response in stream] == []
        await counting
        return turns

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) >= MAX_MESSAGE_ITEMS // batches.MAX_BATCH_ITEMS


def test_a_message_of_too_many_items_ends_the_stream_and_none_of_it_is_taken() -> None:
    async def scenario() -> None:
        taken: list[object] = []
        outbox: Outbox[int] = Outbox()
        stream = serve_items(
            _requests(MAX_MESSAGE_ITEMS + 1),
            lambda *_: taken.append(1),
            outbox,
            _message,
            list,
            settle=lambda: True,
            end=lambda: None,
        )
        with pytest.raises(InvalidArgumentError, match=r"items: 4097 items of one message .* limit of 4096"):
            await anext(stream)
        assert taken == []

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_peer_that_does_not_read_its_results_has_no_more_items_taken() -> None:
    async def scenario() -> None:
        outbox: Outbox[int] = Outbox()
        num_taken = 0

        def take(*_: object) -> None:
            nonlocal num_taken
            num_taken += 1
            outbox.put(1)

        stream = serve_items(
            _requests(*[1000] * 20),
            take,
            outbox,
            _message,
            list,
            settle=lambda: num_taken == 20_000,
            end=lambda: None,
        )
        responses = [await anext(stream)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert num_taken <= 2 * MAX_UNSENT + batches.MAX_BATCH_ITEMS
        responses += [response async for response in stream]  # it reads again
        assert sum(map(len, responses)) == num_taken == 20_000

    asyncio.run(asyncio.wait_for(scenario(), 20))
