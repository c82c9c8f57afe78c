"""Incremental text: detokenisation, stop strings, and both together."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.detokenizer import IncrementalDetokenizer
from orchestrator.stop_strings import StopMatch, StopMatcher
from orchestrator.text_stream import TextStream
from tandem.vocabulary import Vocabulary
from tests.identity.plain import first_stop
from tests.orchestrator.fakes import PIECES

BYTES = Vocabulary.toy(300)
IDS = st.lists(st.integers(-1, PIECES.vocab_size + 2))
STOPS = st.lists(st.text("abc 🔥\ufffd", min_size=1, max_size=5), max_size=4)


def joined(
    vocabulary: Vocabulary, groups: list[list[int]], at_start: bool = True, skip_special: bool = True
) -> str:
    detokenizer = IncrementalDetokenizer(vocabulary, skip_special, at_start)
    return "".join([detokenizer.push(group) for group in groups] + [detokenizer.flush()])


@given(groups=st.lists(st.lists(st.integers(-5, 310))))
def test_deltas_of_random_bytes_join_to_the_decoded_whole(groups: list[list[int]]) -> None:
    ids = [token_id for group in groups for token_id in group]

    assert joined(BYTES, groups) == BYTES.decode(ids)


@given(data=st.binary(), cuts=st.lists(st.integers(0, 40)))
def test_deltas_join_however_bytes_are_grouped(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    groups = [list(data[start:end]) for start, end in pairwise(edges)]

    assert joined(BYTES, groups) == data.decode(errors="replace")


@given(ids=IDS, at_start=st.booleans(), skip_special=st.booleans())
def test_deltas_of_any_tokens_join_to_the_decoded_whole(ids: list[int], at_start: bool, skip_special: bool) -> None:
    expected = PIECES.decode(ids, skip_special, at_start)

    assert joined(PIECES, [[token_id] for token_id in ids], at_start, skip_special) == expected


@given(text=st.text())
def test_split_characters_never_show_as_replacement_characters(text: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    deltas = [detokenizer.push([byte]) for byte in text.encode()]

    assert "".join(deltas) == text
    assert detokenizer.flush() == ""
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")


def test_the_bytes_of_emoji_and_accents_stream_as_whole_characters() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)

    deltas = [detokenizer.push([byte]) for byte in "ok 🔥 世 é".encode()]

    assert [delta for delta in deltas if delta] == list("ok 🔥 世 é")


def test_only_the_very_first_space_is_stripped() -> None:
    detokenizer = IncrementalDetokenizer(PIECES)

    assert [detokenizer.push([token_id]) for token_id in (11, 0, 0, 5, 4, 1)] == ["", "a", " a", "  ", " ", "b"]
    assert joined(PIECES, [[0, 0]], at_start=False) == " a a"


@pytest.mark.parametrize(
    ("stops", "deltas", "expected"),
    [
        (["b"], ["abcdefghi"], StopMatch("b", 2)),
        (["hi", "de"], ["abcdefghi"], StopMatch("de", 5)),
        (["abcd", "bc"], ["abcd"], StopMatch("bc", 3)),
        (["c", "bc", "abc"], ["abc"], StopMatch("abc", 3)),
        (["abc", "bc"], ["a", "b", "c"], StopMatch("abc", 1)),
        (["aab"], ["aaaab"], StopMatch("aab", 5)),
        (["abab c"], ["ababab c"], StopMatch("abab c", 8)),
        (["x"], ["abc"], None),
        ([], ["abc"], None),
    ],
)
def test_the_first_complete_stop_string_wins_and_then_the_longest(
    stops: list[str], deltas: list[str], expected: StopMatch | None
) -> None:
    matcher = StopMatcher(stops)
    found = None
    for delta in deltas:
        assert found is None
        found = matcher.push(delta)

    assert found == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])


@given(ids=IDS, stops=STOPS, include_stop=st.booleans(), take_every=st.integers(1, 4))
def test_emitted_text_is_the_whole_text_cut_at_the_first_stop(
    ids: list[int], stops: list[str], include_stop: bool, take_every: int
) -> None:
    stream = TextStream(PIECES, stops, include_stop)
    longest = max(map(len, stops), default=1)
    emitted = ""
    pushed = 0
    for token_id in ids:
        pushed += 1
        if stream.push(token_id) is not None:
            break
        if pushed % take_every == 0:
            emitted += stream.take()
            pushed_text = joined(PIECES, [ids[:pushed]], at_start=False).removesuffix("\ufffd")
            assert len(pushed_text) - len(emitted) <= longest - 1 + 3
    emitted += stream.finish()

    whole = PIECES.decode(ids, at_start=False)
    expected = first_stop(whole, stops)
    assert stream.matched_stop == (expected[1] if expected else None)
    if expected is None:
        assert emitted == whole
    else:
        start, stop = expected
        assert emitted == whole[: start + len(stop) if include_stop else start]
        assert stop in PIECES.decode(ids[:pushed], at_start=False)
        assert stop not in joined(PIECES, [ids[: pushed - 1]], at_start=False).removesuffix("\ufffd")


def test_text_that_may_begin_a_stop_string_waits_and_is_released_when_it_does_not() -> None:
    stream = TextStream(BYTES, ["STOP"])
    taken = []
    for byte in b"a STxSTO":
        stream.push(byte)
        taken.append(stream.take())

    assert taken == ["a", " ", "", "", "STx", "", "", ""]
    assert stream.finish() == "STO"


def test_a_stop_string_across_tokens_ends_the_text_at_the_completing_token() -> None:
    stream = TextStream(BYTES, [" ha ha"])
    matched = [stream.push(byte) for byte in b"ho ha ha"]

    assert matched == [None] * 7 + [" ha ha"]
    assert stream.take() == "ho"
    assert stream.finish() == ""
    with pytest.raises(ValueError, match="pushed after the end"):
        stream.push(97)


def test_tokens_that_may_not_stop_are_not_searched() -> None:
    stream = TextStream(BYTES, ["b"])

    assert stream.push(ord("b"), may_stop=False) is None
    assert stream.push(ord("a")) is None
    assert stream.push(ord("b")) == "b"
    assert stream.finish() == "ba"


def test_an_unfinished_character_is_shown_only_at_the_end() -> None:
    stream = TextStream(PIECES)
    stream.push(6)

    assert stream.take() == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    with pytest.raises(ValueError, match="pushed after the end"):
        stream.push(7)


def test_answers_keep_their_leading_space_and_hide_special_tokens() -> None:
    stream = TextStream(PIECES)
    for token_id in (0, 11, PIECES.vocab_size + 7, 1):
        stream.push(token_id)

    assert stream.finish() == " ab"
