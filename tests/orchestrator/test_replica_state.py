"""What an orchestrator learns of a replica: when to keep away, how long to wait, when silence is too long."""

import asyncio
import time

import pytest

from orchestrator.breaker import Backoff, Breaker
from orchestrator.round_times import LONGEST_S, RoundTimes
from orchestrator.silence import Silence


def test_a_breaker_opens_for_longer_with_every_failure_and_closes_with_a_success() -> None:
    now = 0.0
    breaker = Breaker(Backoff(1.0, 4.0), lambda: now)
    assert not breaker.is_open
    opened_s = []
    for _ in range(5):
        breaker.failed()
        begun = now
        while breaker.is_open:
            now += 0.05
        opened_s.append(now - begun)
    for number, time_s in enumerate(opened_s):
        longest = min(2.0**number, 4.0)
        assert 0.5 * longest <= time_s <= 1.5 * longest + 0.1
    breaker.failed()
    breaker.worked()
    assert not breaker.is_open


def test_rounds_are_waited_for_as_long_as_they_have_taken_and_a_margin() -> None:
    times = RoundTimes()
    assert times.limit_s == LONGEST_S  # nothing is known
    for _ in range(100):
        times.took(0.4)
    assert 0.4 < times.limit_s < 0.5
    times.took(0.6)
    assert times.limit_s > 0.7  # they vary


def test_a_limit_that_was_too_short_grows_until_a_round_keeps_it() -> None:
    times = RoundTimes()
    for _ in range(100):
        times.took(0.01)
    least = times.limit_s
    limits = []
    for _ in range(8):
        times.was_late()
        limits.append(times.limit_s)
    assert limits[:3] == [2 * least, 4 * least, 8 * least]
    assert limits[-1] == LONGEST_S
    times.took(0.01)
    assert times.limit_s == pytest.approx(least)


def test_silence_is_too_long_only_when_nothing_is_heard() -> None:
    async def scenario() -> None:
        silence = Silence(0.2)
        watch = asyncio.create_task(silence.is_too_long())
        for _ in range(30):
            await asyncio.sleep(0.02)
            silence.heard()
        assert not watch.done()
        await asyncio.wait_for(watch, 10)

    asyncio.run(scenario())


def test_a_process_that_stood_still_itself_has_not_heard_silence() -> None:
    async def scenario() -> None:
        silence = Silence(0.2)
        watch = asyncio.create_task(silence.is_too_long())
        await asyncio.sleep(0)
        blocking_s = 0.5
        asyncio.get_running_loop().call_soon(lambda: time.sleep(blocking_s))
        await asyncio.sleep(0.01)
        silence.heard()
        assert not watch.done()
        watch.cancel()

    asyncio.run(scenario())
