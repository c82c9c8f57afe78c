"""Admission: reservations never exceed the pool, the queue is bounded and first come first served."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.types import ErrorCode, ItemError, SessionId
from target_service.admission import Admission
from target_service.limits import Limits
from target_service.sessions import Session
from tests.target.harness import STREAM, spec


def session(num_blocks: int, session_id: int = 1) -> Session:
    return Session((STREAM, SessionId(session_id)), 1, spec(), num_blocks)


def test_the_worst_case_is_one_row_a_token_in_whole_blocks() -> None:
    admission = Admission(10, 4, 9, 9)
    assert [admission.num_blocks_for(length) for length in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]


def test_a_session_that_could_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ItemError, match=r"never: .*needs 11 blocks of 4 tokens, the pool has 10") as caught:
        Admission(10, 4, 9, 9).offer(session(11))
    assert caught.value.code is ErrorCode.NO_CAPACITY


def test_a_full_queue_is_refused_with_the_numbers() -> None:
    admission = Admission(10, 4, 9, 1)
    assert admission.offer(session(8))
    assert not admission.offer(session(4))
    with pytest.raises(ItemError, match=r"now: 1 sessions of at most 9 hold 8 of 10 .* 1 of at most 1 ") as caught:
        admission.offer(session(1))
    assert caught.value.code is ErrorCode.NO_CAPACITY


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    admission = Admission(10, 4, 9, 9)
    big, small = session(10), session(1)
    holder = session(5)
    assert admission.offer(holder)
    assert not admission.offer(big)
    assert not admission.offer(small)
    assert admission.admit_waiting() == []
    admission.remove(holder)
    assert admission.admit_waiting() == [big]
    admission.remove(big)
    assert admission.admit_waiting() == [small]


def test_the_number_of_sessions_is_bounded_too() -> None:
    admission = Admission(10, 4, 1, 9)
    first, second = session(1), session(1)
    assert admission.offer(first)
    assert not admission.offer(second)
    admission.remove(first)
    assert admission.admit_waiting() == [second]


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=40))
def test_reservations_never_exceed_the_pool_and_come_back_whole(events: list[tuple[int, bool]]) -> None:
    admission = Admission(8, 4, 4, 100)
    live: list[Session] = []
    for size, is_leaving in events:
        if is_leaving and live:
            admission.remove(live.pop(size % len(live)))
        else:
            live.append(session(size))
            admission.offer(live[-1])
        admission.admit_waiting()
        admitted = [entry for entry in live if entry in admission._admitted]
        assert sum(entry.num_blocks for entry in admitted) == admission._num_reserved_blocks <= 8
        assert len(admitted) == admission.num_admitted <= 4
        assert admission.num_admitted + admission.num_waiting == len(live)
    for entry in live:
        admission.remove(entry)
    assert (admission.num_admitted, admission.num_waiting, admission._num_reserved_blocks) == (0, 0, 0)


def test_a_step_too_small_for_a_round_is_refused_naming_both_options() -> None:
    with pytest.raises(ValueError, match=r"--max-step-tokens 16 .*--max-draft-tokens 16 .*17 rows"):
        Limits(max_draft_tokens=16, max_step_tokens=16)
    assert Limits(max_draft_tokens=15, max_step_tokens=16).max_step_tokens == 16
