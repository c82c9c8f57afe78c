"""The n-gram match equals its definition, written out naively, and refuses knobs that contradict each other."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.prompt_lookup import PromptLookup


def naive_find(
    token_ids: Sequence[int], num_draft_tokens: int, max_ngram_size: int, min_ngram_size: int
) -> list[int]:
    """The definition: longest n first, then the right-most earlier start that has a token after its match."""
    for size in range(max_ngram_size, min_ngram_size - 1, -1):
        for start in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[start : start + size] == token_ids[len(token_ids) - size :]:
                return list(token_ids[start + size : start + size + num_draft_tokens])
    return []


# few ids, so that n-grams repeat; 0, 1, 256 and 65536 so that their bytes match across token borders
token_lists = st.lists(st.sampled_from([0, 1, 256, 65536, 2**32 - 1]), max_size=60)


@given(token_lists, st.integers(0, 8), st.integers(1, 6), st.data())
def test_find_equals_the_naive_definition(
    token_ids: list[int], num_draft_tokens: int, max_ngram_size: int, data: st.DataObject
) -> None:
    min_ngram_size = data.draw(st.integers(1, max_ngram_size))
    lookup = PromptLookup(max_ngram_size, min_ngram_size)
    found = lookup.find(token_ids, num_draft_tokens)
    assert found == naive_find(token_ids, num_draft_tokens, max_ngram_size, min_ngram_size)


def test_the_longest_ngram_wins_over_a_later_shorter_one() -> None:
    token_ids = [1, 2, 3, 70, 71, 72, 9, 3, 80, 81, 1, 2, 3]
    assert PromptLookup(max_ngram_size=3).find(token_ids, 3) == [70, 71, 72]
    assert PromptLookup(max_ngram_size=1).find(token_ids, 3) == [80, 81, 1]


def test_the_right_most_match_wins_and_six_tokens_follow_by_default() -> None:
    token_ids = [5, 10, 5, 20, 21, 22, 23, 24, 25, 26, 27, 5]
    assert PromptLookup().find(token_ids) == [20, 21, 22, 23, 24, 25]


@pytest.mark.parametrize("token_ids", [[], [7], [7, 7], [1, 2]])
def test_a_sequence_shorter_than_the_ngram_gives_no_drafts(token_ids: list[int]) -> None:
    assert PromptLookup(max_ngram_size=5, min_ngram_size=3).find(token_ids) == []


def test_errors_name_the_knobs() -> None:
    with pytest.raises(ValueError, match="min_ngram_size 4 is more than max_ngram_size 3"):
        PromptLookup(max_ngram_size=3, min_ngram_size=4)
    with pytest.raises(ValueError, match="min_ngram_size 0 is less than 1"):
        PromptLookup(min_ngram_size=0)
