"""Admission: what is needed now must fit, the queue is bounded, nobody is admitted before a better rank that waits."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.base import KvUsage
from tandem.types import ErrorCode, ItemError, SessionId
from target_service.admission import HEADROOM_BLOCKS, Admission
from target_service.answers import StreamId
from target_service.limits import Limits
from target_service.sessions import Session
from tests.target.harness import STREAM, spec

EMPTY = KvUsage(total_blocks=10, used_blocks=0, cached_blocks=0, free_blocks=10, block_size=4)
PLAIN = Limits(max_draft_tokens=0)  # one round is one row


def admission(limits: Limits = PLAIN, usage: KvUsage = EMPTY) -> Admission:
    return Admission(usage, limits)


def session(num_blocks: int, arrival: int = 1, stream: StreamId = STREAM, priority: int = 0) -> Session:
    """Needs so many blocks now, and never more."""
    subject = spec((1,) * (4 * num_blocks - 1), max_tokens=1, priority=priority)
    return Session((stream, SessionId(arrival)), 1, subject, arrival)


def test_a_sequence_needs_one_row_a_token_in_whole_blocks() -> None:
    assert [admission().num_blocks_for(length) for length in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


def test_a_session_that_could_never_fit_is_refused_with_the_numbers_and_nobody_waits_behind_it() -> None:
    subject = admission()
    with pytest.raises(ItemError, match=r"never: .*needs 11 blocks of 4 tokens, the pool has 10") as caught:
        subject.offer(session(11))
    assert caught.value.code is ErrorCode.NO_CAPACITY
    assert (subject.num_waiting, subject.offer(session(10, 2))) == (0, True)


def test_a_full_queue_is_refused_with_the_numbers() -> None:
    subject = admission(replace(PLAIN, max_sessions=9, max_waiting_sessions=1))
    assert subject.offer(session(8, 1))
    assert not subject.offer(session(4, 2))
    with pytest.raises(ItemError, match=r"now: 1 sessions of at most 9 .* needs 3, and 1 of at most 1 ") as caught:
        subject.offer(session(3, 3))
    assert caught.value.code is ErrorCode.NO_CAPACITY
    assert subject.num_waiting == 1


def test_a_dormant_session_in_the_queue_counts_in_it_and_nobody_waits_behind_it() -> None:
    subject = admission(replace(PLAIN, max_sessions=9, max_waiting_sessions=1))
    dormant = session(9, 2)
    assert (subject.offer(session(5, 1)), subject.offer(dormant)) == (True, False)
    dormant.is_dormant = True
    with pytest.raises(ItemError, match="and 1 of at most 1 sessions are waiting"):
        subject.offer(session(9, 3))
    assert subject.offer(session(2, 4))


def test_only_what_is_needed_now_is_asked_for_with_one_round_and_a_little_headroom_for_each_that_runs() -> None:
    subject = admission(Limits(max_draft_tokens=4))
    small = [
        Session((STREAM, SessionId(n)), 1, spec((1, 2, 3), 37), n) for n in range(5)
    ]  # 2 blocks now, 10 at most
    assert [subject.offer(entry) for entry in small] == [True, True, True, False, False]
    assert (2 + HEADROOM_BLOCKS) * 3 + 2 > 10


def test_rows_that_a_running_session_has_are_not_counted_twice() -> None:
    subject = admission()
    first = session(8, 1)
    assert subject.offer(first)
    first.num_rows = 30
    subject.kv_usage = replace(EMPTY, used_blocks=8, free_blocks=2)
    assert subject.offer(session(1, 2))  # 2 free - 1 of headroom


def test_cached_blocks_count_as_free() -> None:
    assert admission(usage=replace(EMPTY, cached_blocks=10, free_blocks=0)).offer(session(10))
    assert not admission(usage=replace(EMPTY, used_blocks=1, free_blocks=9)).offer(session(10))


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    subject = admission()
    holder, big, small = session(5, 1), session(10, 2), session(1, 3)
    assert [subject.offer(entry) for entry in (holder, big, small)] == [True, False, False]
    assert subject.admit() == []
    subject.remove(holder)
    assert subject.admit() == [big]
    subject.remove(big)
    assert subject.admit() == [small]


def test_a_preempted_session_waits_in_the_place_its_arrival_gives_it() -> None:
    subject = admission()
    first, second, late = session(5, 1), session(3, 2), session(9, 3)
    assert [subject.offer(entry) for entry in (first, second, late)] == [True, True, False]
    subject.requeue(second)
    assert (subject.num_running, subject.num_waiting) == (1, 2)
    assert subject.admit() == [second]


def test_the_number_of_running_sessions_is_bounded_too() -> None:
    subject = admission(replace(PLAIN, max_sessions=1))
    first, second = session(1, 1), session(1, 2)
    assert [subject.offer(entry) for entry in (first, second)] == [True, False]
    subject.remove(first)
    assert subject.admit() == [second]


def test_a_higher_priority_is_admitted_first() -> None:
    subject = admission()
    holder, low, high = session(8, 1), session(5, 2, priority=-1), session(5, 3, priority=5)
    assert [subject.offer(entry) for entry in (holder, low, high)] == [True, False, False]
    subject.remove(holder)
    assert subject.admit() == [high]


def test_a_streams_first_session_is_admitted_before_the_many_of_another() -> None:
    subject = admission(replace(PLAIN, max_sessions=2))
    many = [session(1, number, StreamId(1)) for number in range(6)]
    few = [session(1, number, StreamId(2)) for number in range(6, 8)]
    for entry in many + few:
        subject.offer(entry)
    order = []
    for entry in many[:2]:
        subject.remove(entry)
    for _ in range(3):
        order += subject.admit()
        for entry in order:
            subject.remove(entry)
    assert [entry.arrival for entry in order] == [2, 6, 3, 7, 4, 5]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2), st.booleans()), max_size=40))
def test_sessions_wait_or_run_and_whoever_runs_had_room(events: list[tuple[int, int, bool]]) -> None:
    subject = admission(replace(PLAIN, max_sessions=4))
    live: list[Session] = []
    for number, (size, priority, is_leaving) in enumerate(events):
        if is_leaving and live:
            subject.remove(live.pop(size % len(live)))
        else:
            live.append(session(size, number, StreamId(size % 2), priority))
            subject.offer(live[-1])
        subject.admit()
        assert sum(-(-len(entry.tokens) // 4) for entry in subject.running) <= 10
        assert subject.num_running <= 4
        assert subject.num_running + subject.num_waiting == len(live)
        assert bool(live) == bool(subject.num_running)  # an empty pool has room for anybody
    for entry in live:
        subject.remove(entry)
    assert (subject.num_running, subject.num_waiting) == (0, 0)
