"""Faults that were reported of other systems' memory and queues, each as its own small scenario."""

import asyncio

import pytest

from engine.backends.toy_backend import ToyEngine
from tandem.serving.items import Closed, Opened
from tandem.types import ErrorCode, ItemError, Verdict
from target_service.answers import StreamId
from target_service.limits import Limits
from tests.target.harness import (
    Bench,
    close_item,
    open_item,
    plain_decode,
    serving,
    spec,
    stamp,
    toy,
    verify_item,
)
from tests.target.play import Play, mixed_drafts, play, right_drafts


def prompt_of(length: int, first: int = 1) -> tuple[int, ...]:
    return tuple((first + index) % 30 for index in range(length))


def cached_entries(engine: ToyEngine) -> int:
    """Digests that the prefix cache knows."""
    return len(engine._sequences._pool._cache)


@pytest.mark.parametrize("prompt_len", range(11, 19))
def test_a_rollback_across_a_blocks_edge_gives_the_block_back_and_others_use_it(prompt_len: int) -> None:
    session = spec(prompt_of(prompt_len))
    bench = Bench(toy(num_blocks=4, block_size=16), Limits(max_draft_tokens=4))
    bench.open(session)
    tokens = list(session.token_ids)
    bench.round(tokens, 1)
    wrong = [(token + 1) % 30 for token in plain_decode(session, most=5)[1:]]
    assert bench.round(tokens, 2, wrong).num_accepted == 0
    (held,) = map(bench.engine.token_ids, bench.engine.sequence_ids)
    assert (len(tokens), len(held)) == (prompt_len + 2, prompt_len + 1)
    assert bench.used_blocks() == -(-(prompt_len + 1) // 16)
    assert play(bench, {2: spec((9,) * 12, 2)}).outputs[2] == plain_decode(spec((9,) * 12, 2))
    bench.round(tokens, 3, plain_decode(session, most=6)[2:])
    assert tokens[prompt_len:] == plain_decode(session, most=len(tokens) - prompt_len)


@pytest.mark.parametrize("block_size", [16, 64])
def test_slots_of_rejected_drafts_are_returned_by_one_request_and_by_a_hundred_more(block_size: int) -> None:
    bench = Bench(toy(num_blocks=64, block_size=block_size, prefix_cache=True), Limits(max_draft_tokens=4))
    first = {1000: spec(prompt_of(15), 12)}
    play(bench, first, mixed_drafts(right_drafts(first), lambda length: length % 5))
    sessions = {number: spec((number % 30, number // 30, 5), 10) for number in range(100)}
    played = play(bench, sessions, mixed_drafts(right_drafts(sessions), lambda length: length % 4))
    assert played.outputs == {number: plain_decode(session) for number, session in sessions.items()}
    usage = bench.engine.kv_usage()
    assert (usage.used_blocks, usage.free_blocks + usage.cached_blocks) == (0, usage.total_blocks)


def test_a_cached_prompt_changes_neither_the_text_nor_what_is_accepted() -> None:
    session, other = spec(prompt_of(64), 30), spec(prompt_of(50, first=9), 30)
    kept: dict[bool, list[int]] = {}
    for prefix_cache in (False, True):
        bench = Bench(toy(num_blocks=48, prefix_cache=prefix_cache))
        kept[prefix_cache] = []
        for number, subject in enumerate((session, other, session, other, session)):
            drafts_of = mixed_drafts(right_drafts({number: subject}), lambda length: length % 4)
            played = play(bench, {number: subject}, drafts_of)
            assert played.outputs[number] == plain_decode(subject)
            kept[prefix_cache].append(sum(verdict.num_accepted for verdict in played.verdicts[number]))
    assert kept[True] == kept[False]
    assert bench.table.load().hit_blocks > 0


def test_a_reused_block_is_no_longer_found_by_its_old_tokens_and_the_map_does_not_grow() -> None:
    bench = Bench(toy(num_blocks=8, prefix_cache=True), Limits(max_draft_tokens=4))
    wanted, outputs = spec(prompt_of(8), 4), []
    others = [spec(prompt_of(14, first=first), 12) for first in (5, 11, 17, 23)]
    for number, subject in enumerate((wanted, *others, wanted)):
        outputs.append(play(bench, {number: subject}, right_drafts({number: subject})).outputs[number])
        assert cached_entries(bench.engine) <= 8
    assert bench.table.load().evicted_blocks > 0
    assert outputs[0] == outputs[-1] == plain_decode(wanted)


def test_a_request_that_fits_the_context_but_not_the_pool_is_refused_at_once_and_blocks_nobody() -> None:
    bench = Bench(toy(num_blocks=16, block_size=4, max_context=256))
    error = bench.open(spec(prompt_of(100), 10), 1)
    assert isinstance(error, ItemError)
    assert error.code is ErrorCode.NO_CAPACITY
    assert "never" in error.message
    assert play(bench, {2: spec(prompt_of(8), 4)}).outputs[2] == plain_decode(spec(prompt_of(8), 4))


def test_a_pool_with_one_free_block_three_decoders_and_a_chunked_prompt_loses_nothing() -> None:
    limits = Limits(max_draft_tokens=4, max_prefill_tokens=32)
    bench = Bench(toy(num_blocks=1 + 3 * 9 + 29, block_size=4), limits)
    deciders = {number: spec(prompt_of(30, first=number), 30) for number in (1, 2, 3)}
    late = spec(prompt_of(100, first=12), 14)
    played = Play(bench, mixed_drafts(right_drafts(deciders | {4: late}), lambda length: length % 5))
    for number, session in deciders.items():
        played.begin(session, number)
    while not all(played.verdicts.values()):
        played.step()
    played.begin(late, 4)
    while not played.verdicts[4]:
        played.step()  # it emits nothing, and has no drafts, before its whole prompt is in
        assert len(bench.table._steps._plan.items) <= 4
    assert played.run() == {number: plain_decode(session) for number, session in (deciders | {4: late}).items()}
    load = bench.table.load()
    assert load.preemptions + load.shrunk_draft_tokens > 0


@pytest.mark.parametrize("point", ["queued", "in a prefill chunk", "in flight", "answered, not used"])
def test_an_abort_at_any_point_frees_everything_twice_is_harmless_and_neighbours_go_on(point: str) -> None:
    limits = Limits(max_sessions=1 if point == "queued" else 2, max_step_tokens=20)
    bench = Bench(toy(), limits)
    neighbour, subject = spec((5, 6), 20), spec(prompt_of(60), 20)
    tokens = list(neighbour.token_ids)
    bench.open(neighbour, 1)
    bench.round(tokens, 1, session=1)
    used = bench.used_blocks()
    bench.open(subject, 2)
    mark = stamp(subject.token_ids, 1, 2)
    bench.submit(mark)
    plan = None
    if point == "in a prefill chunk":
        bench.step()
    if point in ("in a prefill chunk", "in flight"):
        plan = bench.table.plan_step(0.0)
        assert plan is not None
    if point == "answered, not used":
        bench.settle()
    for _ in range(2):
        assert bench.close(mark) in (None, Closed())
    if plan is not None:
        bench.compute(plan)
    bench.settle()
    assert (bench.used_blocks(), len(bench.table), bench.table.load().waiting) == (used, 1, 0)
    bench.round(tokens, 2, session=1)
    assert tokens[2:] == plain_decode(neighbour, most=2)


def test_a_peer_that_is_gone_without_a_close_leaves_nothing_once_its_stream_or_its_lease_ends() -> None:
    async def main(limits: Limits, *, is_stream_kept: bool) -> None:
        async with serving(toy(), limits) as service, service.client() as stays:
            async with service.client() as leaves:
                client = stays if is_stream_kept else leaves
                assert await client.ask(open_item(spec(prompt_of(40)), 1)) == [Opened()]
                (verdict,) = await client.ask(verify_item(stamp(prompt_of(40), 1, 1)))
                assert isinstance(verdict, Verdict)
            await service.until_idle()
            await stays.ask(close_item(stamp((), 0, 9)))
            assert stays.responses[-1].load.used_blocks == 0

    asyncio.run(main(Limits(), is_stream_kept=False))
    # long enough for the round on a busy machine
    asyncio.run(main(Limits(session_lease_s=2.0), is_stream_kept=True))


def test_sessions_of_a_stream_that_ends_while_they_wait_are_gone_from_the_queue() -> None:
    bench = Bench(limits=Limits(max_sessions=1))
    bench.open(spec(), 1)
    for number in range(2, 6):
        bench.open(spec(), number, stream=StreamId(2))
    bench.table.end_stream(StreamId(2))
    assert bench.table.load().waiting == 0
    assert bench.table.settle_stream(StreamId(2))


def test_of_a_flood_of_opens_the_excess_is_refused_and_those_that_run_notice_nothing() -> None:
    async def scenario() -> None:
        limits = Limits(max_sessions=2, max_waiting_sessions=1)
        async with serving(toy(), limits) as service, service.client() as client:
            tokens = {1: list(spec().token_ids), 2: list(spec().token_ids)}
            assert await client.ask(*(open_item(spec(), number) for number in tokens)) == [Opened(), Opened()]
            for round_number in range(1, 6):
                flood = await client.send(*(open_item(spec(), 100 * round_number + number) for number in range(9)))
                verdicts = await client.ask(
                    *(verify_item(stamp(tokens[number], round_number, number)) for number in tokens)
                )
                for number, verdict in zip(tokens, verdicts, strict=True):
                    assert isinstance(verdict, Verdict)
                    tokens[number] += verdict.token_ids
                refused = [await one for one in flood if one.done()]
                assert len(refused) == (8 if round_number == 1 else 9)  # one waits for room, for good
                assert {getattr(one, "code", None) for one in refused} == {ErrorCode.NO_CAPACITY}
                assert service.scheduler.table.load().running == 2
            assert all(one[len(spec().token_ids) :] == plain_decode(spec(), most=5) for one in tokens.values())

    asyncio.run(asyncio.wait_for(scenario(), 60))
