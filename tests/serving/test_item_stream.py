"""The outbox: everything put is written once, in order, in batches; closing ends the stream after the rest."""

import asyncio

from tandem.serving.item_stream import Outbox


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
