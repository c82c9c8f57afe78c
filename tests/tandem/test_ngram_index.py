"""The recurrence of every token against a search from the start, after any appends and steps back."""

import random

from hypothesis import given
from hypothesis import strategies as st

from tandem.ngram_index import NgramIndex
from tests.heads import searched_recurrence


@given(st.lists(st.integers(0, 3), max_size=40))
def test_each_token_has_what_a_search_finds(tokens: list[int]) -> None:
    index = NgramIndex()
    for token in tokens:
        index.append(token)
    assert index.token_ids == tokens
    assert index.recurrences == [searched_recurrence(tokens[: place + 1]) for place in range(len(tokens))]


@given(st.integers(0, 1000))
def test_going_back_leaves_nothing_of_what_was_taken_back(seed: int) -> None:
    rng, index = random.Random(seed), NgramIndex()
    tokens: list[int] = []
    for _ in range(30):
        if rng.random() < 0.3:
            tokens = tokens[: rng.randint(0, len(tokens))]
            index.truncate(len(tokens))
        added = [rng.randint(0, 3) for _ in range(rng.randint(0, 5))]
        tokens += added
        for token in added:
            index.append(token)
    fresh = NgramIndex()
    for token in tokens:
        fresh.append(token)
    assert (
        index.recurrences
        == fresh.recurrences
        == [searched_recurrence(tokens[: place + 1]) for place in range(len(tokens))]
    )
    index.truncate(0)
    assert not index._last
