"""Results on their way: each is written once, in order, in batches; closing ends the stream after the rest."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.draft.v1 import draft_pb2 as pb
from tandem.serving import batches
from tandem.serving.item_stream import Outbox, serve_items


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
