"""The memory of `suffix` is bounded: open sessions come first, and the oldest outputs go first."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.proposers.base import SessionKey
from draft_service.proposers.suffix_automaton import Match, SuffixAutomaton
from draft_service.proposers.suffix_memory import SuffixMemory


def read(memory: SuffixMemory, key: int, token_ids: Sequence[int], prompt_len: int = 1) -> bool:
    """Read all of the tokens; whether there was room."""
    reading = memory.open(SessionKey(key), prompt_len, token_ids)
    if reading is not None:
        memory.read(reading, token_ids)
    return reading is not None


def length_of_match(memory: SuffixMemory, token_ids: Sequence[int]) -> int:
    """The longest match of these tokens in the outputs."""
    reading = memory.open(SessionKey(99), 1, token_ids)
    assert reading is not None
    memory.read(reading, token_ids)
    return max((match.length for _, match in memory.output_places(reading)), default=0)


def test_a_session_that_has_ended_leaves_its_output_and_not_its_prompt() -> None:
    memory = SuffixMemory(1000, keeps_outputs=True)
    read(memory, 1, [1, 2, 3, 4, 5, 6], prompt_len=3)
    memory.forget(SessionKey(1))
    assert memory.num_tokens == 4  # three of the output, and what separates it from the next
    assert length_of_match(memory, [4, 5, 6]) == 3
    assert length_of_match(memory, [1, 2, 3]) == 0


def test_outputs_do_not_run_into_each_other() -> None:
    memory = SuffixMemory(1000, keeps_outputs=True)
    for key, output in enumerate(([4, 5], [6, 7])):
        read(memory, key, [1, *output])
        memory.forget(SessionKey(key))
    assert length_of_match(memory, [4, 5, 6, 7]) == 2


def test_without_outputs_nothing_is_left_of_a_session() -> None:
    memory = SuffixMemory(1000, keeps_outputs=False)
    read(memory, 1, [1, 2, 3, 4])
    memory.forget(SessionKey(1))
    assert memory.num_tokens == 0


def test_the_oldest_outputs_go_first() -> None:
    memory = SuffixMemory(40, keeps_outputs=True)  # four parts of ten
    for key in range(6):
        read(memory, key, [1, *range(10 * key, 10 * key + 9)])
        memory.forget(SessionKey(key))
    found = [length_of_match(memory, [10 * key, 10 * key + 1]) for key in range(6)]
    assert found == [0, 0, 0, 2, 2, 2]


def test_of_a_longer_output_than_a_part_its_end_is_kept() -> None:
    memory = SuffixMemory(40, keeps_outputs=True)
    read(memory, 1, range(30))
    memory.forget(SessionKey(1))
    assert memory.num_tokens == 10
    assert length_of_match(memory, range(5, 30)) == 9


def test_a_session_without_room_is_not_kept_and_finds_room_when_another_has_ended() -> None:
    memory = SuffixMemory(20, keeps_outputs=False)
    assert read(memory, 1, range(15))
    assert not read(memory, 2, range(10))
    assert read(memory, 1, range(20))
    assert not read(memory, 1, range(21))  # it has grown too long, and makes room
    assert read(memory, 2, range(10))
    assert memory.num_tokens == 10


def test_other_tokens_than_were_read_are_read_from_the_start() -> None:
    memory = SuffixMemory(100, keeps_outputs=True)
    read(memory, 1, [1, 2, 3, 4, 5])
    for token_ids in ([1, 2, 3], [1, 2, 9], [1, 2, 9, 4, 5, 6]):
        read(memory, 1, token_ids)
        assert memory.num_tokens == len(token_ids)
    memory.forget(SessionKey(1))
    assert length_of_match(memory, [2, 9, 4, 5, 6]) == 5
    assert length_of_match(memory, [2, 3]) == 0


def test_growing_sessions_are_read_once_a_token_in_themselves_and_in_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SuffixMemory(1000, keeps_outputs=True)
    read(memory, 1, range(150))
    memory.forget(SessionKey(1))
    appended: list[int] = []
    looked_up: list[int] = []
    append, advance = SuffixAutomaton.append, SuffixAutomaton.advance

    def counted_append(automaton: SuffixAutomaton, token_id: int) -> None:
        appended.append(token_id)
        append(automaton, token_id)

    def counted_advance(automaton: SuffixAutomaton, match: Match, token_id: int) -> Match:
        looked_up.append(token_id)
        return advance(automaton, match, token_id)

    monkeypatch.setattr(SuffixAutomaton, "append", counted_append)
    monkeypatch.setattr(SuffixAutomaton, "advance", counted_advance)
    for length in range(5, 120, 3):
        read(memory, 2, range(length))
    assert appended == looked_up == list(range(119))
    assert (
        length_of_match(memory, range(1, 120)) == 64
    )  # a session that is new to the outputs is not looked up in full


steps = st.tuples(st.integers(0, 4), st.lists(st.integers(0, 3), min_size=1, max_size=30), st.booleans())


@given(st.integers(1, 60), st.lists(steps, max_size=30), st.booleans())
def test_never_more_tokens_than_allowed(
    max_tokens: int, history: list[tuple[int, list[int], bool]], keeps: bool
) -> None:
    memory = SuffixMemory(max_tokens, keeps_outputs=keeps)
    sessions: set[int] = set()
    for key, token_ids, ends in history:
        read(memory, key, token_ids)
        sessions.add(key)
        if ends:
            memory.forget(SessionKey(key))
        held = [len(reading.own) for reading in memory._readings.values()]
        held += [len(part) for part in memory._outputs.values()]
        assert memory.num_tokens == sum(held) <= max_tokens
    for key in sessions:
        memory.forget(SessionKey(key))
    assert keeps or memory.num_tokens == 0


def test_no_room_at_all_is_refused_by_the_options_name() -> None:
    with pytest.raises(ValueError, match="--max-suffix-tokens 0 is less than 1"):
        SuffixMemory(0, keeps_outputs=True)
