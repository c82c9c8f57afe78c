"""The automaton's answers equal their definitions, written out naively over all stretches of the text."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from draft_service.proposers.suffix_automaton import NO_MATCH, SEPARATOR, Match, SuffixAutomaton

# few ids, so that stretches repeat; short enough that every token is counted in all of its states
texts = st.lists(st.sampled_from([0, 1, 2, 2**32 - 1, SEPARATOR]), max_size=30)
tokens = st.lists(st.sampled_from([0, 1, 2, 2**32 - 1]), max_size=12)


def automaton_of(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token_id in text:
        automaton.append(token_id)
    return automaton


def stands_in(stretch: Sequence[int], text: Sequence[int]) -> bool:
    return bool(stretch) and any(
        list(text[start : start + len(stretch)]) == list(stretch) for start in range(len(text) - len(stretch) + 1)
    )


def longest_end(tokens: Sequence[int], text: Sequence[int]) -> list[int]:
    """The longest end of the tokens that stands in the text."""
    return next((list(tokens[start:]) for start in range(len(tokens)) if stands_in(tokens[start:], text)), [])


def follower_of(stretch: Sequence[int], text: Sequence[int]) -> tuple[int, float, list[int]] | None:
    """(what follows most often, last of equals; its share; the stretch with it) of the longest end with a follower."""
    for start in range(len(stretch)):
        end = list(stretch[start:])
        places = [index for index in range(len(end), len(text)) if list(text[index - len(end) : index]) == end]
        counts = Counter(text[index] for index in places if text[index] != SEPARATOR)
        if counts:
            last = {text[index]: index for index in places}
            best = max(counts, key=lambda token_id: (counts[token_id], last[token_id]))
            return best, counts[best] / counts.total(), [*end, best]
    return None


def match_of(stretch: Sequence[int], automaton: SuffixAutomaton) -> Match:
    match = NO_MATCH
    for token_id in stretch:
        match = automaton.advance(match, token_id)
    return match


@given(texts)
def test_the_longest_end_that_stood_before_is_known_after_every_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for index, token_id in enumerate(text):
        automaton.append(token_id)
        read = text[: index + 1]
        expected = next((read[start:] for start in range(1, len(read)) if _stood_before(read[start:], read)), [])
        assert automaton.repeated().length == len(expected)
        assert automaton.repeated() == match_of(expected, automaton)
    assert len(automaton) == len(text)


def _stood_before(end: Sequence[int], text: Sequence[int]) -> bool:
    return stands_in(end, text[:-1])


@given(texts, tokens)
def test_advancing_finds_the_longest_end_of_what_was_read_that_stands_in_the_text(
    text: list[int], read: list[int]
) -> None:
    assert match_of(read, automaton_of(text)).length == len(longest_end(read, text))


@given(texts, tokens)
def test_what_follows_is_the_most_frequent_and_last_follower_of_the_longest_end_that_has_one(
    text: list[int], read: list[int]
) -> None:
    automaton = automaton_of(text)
    follower = automaton.follower(match_of(read, automaton))
    expected = follower_of(longest_end(read, text), text)
    assert (follower is None) == (expected is None)
    if follower is not None and expected is not None:
        assert (follower.token_id, follower.share) == expected[:2]
        assert follower.match.length == len(expected[2])
        assert automaton.follower(follower.match) == automaton.follower(match_of(expected[2], automaton))


@given(texts, texts, tokens, tokens)
def test_a_match_from_before_appends_goes_on_as_a_new_one_would(
    text: list[int], more: list[int], before: list[int], after: list[int]
) -> None:
    automaton = automaton_of(text)
    match = match_of(before, automaton)
    for token_id in more:
        automaton.append(token_id)
    found = longest_end(before, text)
    assert automaton.follower(match) == automaton.follower(match_of(found, automaton))
    for token_id in after:
        match = automaton.advance(match, token_id)
    assert match.length == len(longest_end([*found, *after], [*text, *more]))


def test_no_text_matches_and_follows_nothing() -> None:
    automaton = SuffixAutomaton()
    assert automaton.repeated() == NO_MATCH
    assert automaton.follower(NO_MATCH) is None
    assert automaton.advance(NO_MATCH, 7) == NO_MATCH


def test_states_are_at_most_two_a_token_in_texts_that_make_the_most_of_them() -> None:
    for text in ([7] * 500, [1, *[2] * 499], [*[1, 2] * 250], [1, *[2, 3] * 250]):
        assert len(automaton_of(text)._len) <= 2 * len(text)


def test_in_a_text_of_one_token_the_last_states_count_and_the_token_still_follows_itself() -> None:
    automaton = automaton_of([7] * 500)
    follower = automaton.follower(automaton.repeated())
    assert follower is not None
    assert (follower.token_id, follower.share) == (7, 1.0)
