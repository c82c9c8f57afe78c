"""Several answers on one stream: in order, bounded, and all closed whatever ends them."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from orchestrator.answers import interleaved


class Answers:
    """Scripted answers that log what they make and that they were closed."""

    def __init__(self) -> None:
        self.num_made = 0
        self.closed: list[str] = []

    async def events(
        self, name: str, num_events: int, error: BaseException | None = None
    ) -> AsyncGenerator[str, None]:
        """`num_events` events, one a turn of the loop, then the error if there is one."""
        try:
            for number in range(num_events):
                await asyncio.sleep(0)
                self.num_made += 1
                yield f"{name}{number}"
            if error is not None:
                raise error
        finally:
            self.closed.append(name)

    async def silence(self, name: str) -> AsyncGenerator[str, None]:
        """Never an event."""
        try:
            await asyncio.Event().wait()
            yield "never"
        finally:
            self.closed.append(name)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


async def taken(events: AsyncGenerator[str, None], into: list[str]) -> None:
    async with aclosing(events):
        async for event in events:
            into.append(event)


def test_all_events_come_interleaved_and_each_answers_in_its_order() -> None:
    async def scenario() -> None:
        answers = Answers()
        seen: list[str] = []
        await taken(interleaved([answers.events("a", 5), answers.events("b", 3)]), seen)
        assert [event for event in seen if event[0] == "a"] == ["a0", "a1", "a2", "a3", "a4"]
        assert [event for event in seen if event[0] == "b"] == ["b0", "b1", "b2"]
        assert seen.index("b0") < seen.index("a4")
        assert sorted(answers.closed) == ["a", "b"]

    run(scenario())


def test_an_answer_without_events_keeps_nobody_waiting() -> None:
    async def scenario() -> None:
        answers = Answers()
        seen: list[str] = []
        await taken(interleaved([answers.events("a", 0), answers.events("b", 2)]), seen)
        assert seen == ["b0", "b1"]

    run(scenario())


def test_one_failure_is_raised_as_it_is_after_what_came_before_and_ends_the_others() -> None:
    async def scenario() -> None:
        answers = Answers()
        seen: list[str] = []
        error = ConnectionError("gone")
        with pytest.raises(ConnectionError, match="gone") as caught:
            await taken(interleaved([answers.silence("a"), answers.events("b", 2, error)]), seen)
        assert caught.value is error
        assert seen == ["b0", "b1"]
        assert sorted(answers.closed) == ["a", "b"]

    run(scenario())


def test_of_failures_at_the_same_time_one_is_raised() -> None:
    async def scenario() -> None:
        answers = Answers()
        errors = [ConnectionError(name) for name in "abc"]
        made = [answers.events(str(error), 1, error) for error in errors]
        with pytest.raises(ConnectionError) as caught:
            await taken(interleaved(made), [])
        assert caught.value in errors
        assert sorted(answers.closed) == ["a", "b", "c"]

    run(scenario())


def test_a_failure_ends_the_others_while_nobody_reads() -> None:
    async def scenario() -> None:
        answers = Answers()
        error = ConnectionError("gone")
        async with aclosing(interleaved([answers.silence("a"), answers.events("b", 2, error)])) as events:
            assert await anext(events) == "b0"
            for _ in range(20):
                await asyncio.sleep(0)
            assert sorted(answers.closed) == ["a", "b"]

    run(scenario())


def test_a_cancellation_that_nobody_asked_for_is_not_taken_for_an_end() -> None:
    async def scenario() -> None:
        answers = Answers()
        seen: list[str] = []
        with pytest.raises(asyncio.CancelledError):
            await taken(
                interleaved([answers.events("a", 1, asyncio.CancelledError()), answers.events("b", 3)]), seen
            )
        assert [event for event in seen if event[0] == "b"] == ["b0", "b1", "b2"]

    run(scenario())


@pytest.mark.parametrize("num_taken", [1, 4])
def test_leaving_early_closes_every_answer(num_taken: int) -> None:
    async def scenario() -> None:
        answers = Answers()
        async with aclosing(
            interleaved([answers.events("a", 1000), answers.silence("b"), answers.events("c", 1000)])
        ) as events:
            for _ in range(num_taken):
                await anext(events)
        assert sorted(answers.closed) == ["a", "b", "c"]

    run(scenario())


def test_a_reader_that_is_cancelled_while_it_waits_closes_every_answer() -> None:
    async def scenario() -> None:
        answers = Answers()
        reading = asyncio.create_task(taken(interleaved([answers.silence("a"), answers.silence("b")]), []))
        for _ in range(5):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        assert sorted(answers.closed) == ["a", "b"]

    run(scenario())


def test_answers_wait_for_a_slow_reader() -> None:
    async def scenario() -> None:
        answers = Answers()
        async with aclosing(interleaved([answers.events(name, 1000) for name in "abc"])) as events:
            for num_taken in (1, 2, 10):
                for _ in range(num_taken):
                    await anext(events)
                already = answers.num_made
                for _ in range(200):
                    await asyncio.sleep(0)
                assert answers.num_made - already <= 2 * 3
            assert answers.num_made <= 13 + 2 * 3

    run(scenario())
