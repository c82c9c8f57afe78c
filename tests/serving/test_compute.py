"""The compute thread: one function at a time, and whether it has hung."""

import asyncio
import threading

from tandem.serving.compute import ComputeThread


def test_a_function_that_runs_too_long_freezes_the_thread_until_it_ends() -> None:
    async def scenario() -> None:
        now = 0.0
        compute = ComputeThread("test", freeze_s=10.0, clock=lambda: now)
        begun, released = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            released.wait(20)

        assert not compute.is_frozen
        running = asyncio.create_task(compute.run(hang))
        await asyncio.to_thread(begun.wait, 20)
        now = 10.0
        assert not compute.is_frozen
        now = 10.1
        assert compute.is_frozen
        released.set()
        await running
        assert not compute.is_frozen
        compute.close()

    asyncio.run(scenario())


def test_a_function_that_raises_leaves_the_thread_free() -> None:
    async def scenario() -> None:
        now = 0.0
        compute = ComputeThread("test", freeze_s=1.0, clock=lambda: now)
        try:
            await compute.run(lambda: 1 // 0)
        except ZeroDivisionError:
            now = 5.0
            assert not compute.is_frozen
            assert await compute.run(lambda: 3) == 3
        else:
            raise AssertionError("it must raise")
        compute.close()

    asyncio.run(scenario())
