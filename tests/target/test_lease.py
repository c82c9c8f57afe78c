"""Sessions whose owner has gone without a word are freed; whoever comes back opens again."""

import asyncio

from tandem.serving.items import Opened
from tandem.types import ErrorCode, ItemError, Verdict
from target_service.limits import Limits
from tests.target.harness import Bench, close_item, open_item, plain_decode, serving, spec, stamp, toy, verify_item

PROMPT = [1, 2, 3]
LEASE = Limits(session_lease_s=10.0)


def test_a_session_without_an_item_for_longer_than_its_lease_is_freed_and_unknown_afterwards() -> None:
    bench = Bench(limits=LEASE)
    bench.open(spec())
    tokens = list(PROMPT)
    bench.now_s = 5.0
    bench.round(tokens, 1)
    bench.table.expire(bench.now_s)  # the lease counts from the end of the step
    assert bench.table.next_deadline_s() == bench.now_s + 10.0
    bench.table.expire(bench.now_s + 9.9)
    assert len(bench.table) == 1
    bench.table.expire(bench.now_s + 10.0)
    bench.settle()
    load = bench.table.load()
    assert (load.evicted_sessions, load.running, load.used_blocks) == (1, 0, 0)
    error = bench.submit(stamp(tokens, 2))
    assert isinstance(error, ItemError)
    assert error.code is ErrorCode.UNKNOWN_SESSION
    again = spec(token_ids=tuple(tokens), prompt_len=3)
    assert bench.open(again, epoch=2) == Opened()
    bench.round(tokens, 1, epoch=2)
    assert tokens[3:] == plain_decode(spec(), most=2)


def test_every_item_renews_the_lease_even_one_that_is_only_repeated() -> None:
    bench = Bench(limits=LEASE)
    bench.open(spec())
    bench.round(list(PROMPT), 1)
    bench.now_s = 8.0
    assert isinstance(bench.submit(stamp(PROMPT, 1)), Verdict)
    bench.table.expire(17.0)
    assert bench.open(spec()) == Opened()
    bench.now_s = 16.0
    assert bench.open(spec()) == Opened()
    bench.table.expire(25.0)
    assert len(bench.table) == 1


def test_whoever_waits_for_room_or_for_its_round_is_not_idle() -> None:
    bench = Bench(limits=Limits(max_sessions=1, session_lease_s=10.0))
    bench.open(spec(), 1)
    bench.open(spec(), 2)
    bench.submit(stamp(PROMPT, 1, 1))
    bench.table.expire(1000.0)
    assert len(bench.table) == 2
    bench.now_s = 1000.0
    assert bench.step() == 1
    bench.table.expire(1001.0)  # the lease counts from the answer, not from the question
    assert (len(bench.table), bench.table.load().evicted_sessions) == (2, 0)
    bench.table.expire(1010.9)
    assert bench.table.load().evicted_sessions == 0
    bench.table.expire(1011.0)
    bench.now_s = 1020.0
    bench.settle()
    assert bench.answers[-1][1].outcome == Opened()
    bench.table.expire(1029.0)  # who has waited for a place for longer than a lease has just begun with its own
    assert bench.table.load().evicted_sessions == 1


def test_a_session_that_is_part_of_a_step_is_not_freed_under_it() -> None:
    bench = Bench(limits=LEASE)
    bench.open(spec())
    plan = bench.table.plan_step(0.0)
    assert plan is not None
    assert len(plan.items) == 1
    bench.table.expire(100.0)
    assert len(bench.table) == 1
    bench.table.commit(bench.verifier.step(plan))
    bench.table.expire(100.0)
    bench.table.expire(110.0)
    assert len(bench.table) == 0


def test_the_server_frees_idle_sessions_without_any_other_event() -> None:
    async def main() -> None:
        async with serving(toy(), Limits(session_lease_s=0.05)) as service, service.client() as client:
            await client.ask(open_item(spec(), 1), verify_item(stamp(PROMPT, 1, 1)))
            await service.until_idle()
            (error,) = await client.ask(verify_item(stamp(PROMPT, 2, 1)))
            assert isinstance(error, ItemError)
            assert error.code is ErrorCode.UNKNOWN_SESSION
            await client.ask(close_item(stamp(PROMPT, 0, 1)))
            assert client.responses[-1].load.evicted_sessions == 1
            assert not service.scheduler._gathering._answered_s

    asyncio.run(main())
