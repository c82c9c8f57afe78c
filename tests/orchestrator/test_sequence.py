"""A sequence's tokens, text, figures and end agree, whatever a round brings."""

from typing import Any

import pytest

from orchestrator.sequence import BadVerdictError, RoundOutput, Sequence
from tandem.prefix_hash import HashedTokens
from tandem.types import FinishReason, LogprobsOptions, Proposal, TokenLogprobs, Verdict
from tests.orchestrator.fakes import BYTES, PROMPT, letters, make_sequence, verdict_of


def commit(sequence: Sequence, script: list[int], drafts: list[int]) -> RoundOutput:
    """One round with these drafts, judged by a target whose plain output is the script."""
    return sequence.commit(Proposal(tuple(drafts)), verdict_of(script, sequence, drafts))


@pytest.mark.parametrize("index", range(5))
def test_an_eos_among_accepted_drafts_ends_the_output_there(index: int) -> None:
    script = letters("abcdefghij")
    sequence = make_sequence(eos=[script[index]])
    output = sequence.commit(Proposal(tuple(script[:4])), Verdict(4, 4, tuple(script[:5]), FinishReason.STOP))
    assert output.token_ids == tuple(script[: index + 1])
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.matched_token_id == script[index]
    assert sequence.num_completion_tokens == index + 1
    assert output.num_draft_tokens == output.num_accepted == min(4, index + 1)


def test_a_stop_string_early_in_an_accepted_block_is_seen_and_cuts_tokens_text_and_figures() -> None:
    script = letters("abcdefghi")
    sequence = make_sequence(stops=["b"], k=8)
    output = commit(sequence, script, script[:8])
    assert output == RoundOutput(tuple(script[:2]), "a", 2, 2)
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.matched_stop_string == "b"
    assert (sequence.stats.num_draft_tokens, sequence.stats.num_accepted) == (2, 2)
    assert sequence.tokens.token_ids == [*PROMPT, *script[:2]]


def test_ids_end_with_the_token_that_completes_a_stop_string_over_several_rounds() -> None:
    script = letters("xx ha ha ha ha")
    sequence = make_sequence(stops=[" ha ha ha"], k=3, max_tokens=14)
    texts = []
    while sequence.finish_reason is None:
        start = sequence.num_completion_tokens
        texts.append(commit(sequence, script, script[start : start + 3]).text)
    assert "".join(texts) == "xx"
    assert sequence.tokens.token_ids[len(PROMPT) :] == letters("xx ha ha ha")
    assert sequence.num_completion_tokens == len("xx ha ha ha")


def test_a_stop_string_may_stay_in_the_text() -> None:
    sequence = make_sequence(stops=["cd"], include_stop=True)
    assert commit(sequence, letters("abcde"), letters("abcd")).text == "abcd"


@pytest.mark.parametrize("min_tokens", range(5))
def test_no_stop_string_and_no_eos_before_min_tokens(min_tokens: int) -> None:
    script = letters("zbbbbbbbbb")
    by_string = make_sequence(stops=["b"], min_tokens=min_tokens)
    by_id = make_sequence(eos=letters("b"), min_tokens=min_tokens)
    for sequence in (by_string, by_id):
        while sequence.finish_reason is None:
            start = sequence.num_completion_tokens
            commit(sequence, script, script[start : start + 4])
        assert sequence.finish_reason is FinishReason.STOP
        assert sequence.num_completion_tokens == max(2, min_tokens + 1)


def test_max_tokens_end_the_output_with_its_last_chunk_complete() -> None:
    script = letters("abcdefghij")
    sequence = make_sequence(max_tokens=7)
    outputs = []
    while sequence.finish_reason is None:
        start = sequence.num_completion_tokens
        outputs.append(commit(sequence, script, script[start : start + sequence.num_draft_tokens()]))
    assert [output.text for output in outputs] == ["abcde", "fg"]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_completion_tokens == 7


def test_held_back_text_is_flushed_with_the_last_tokens() -> None:
    script = letters("ab stoX")
    sequence = make_sequence(stops=["stop!"], max_tokens=6, k=0)
    texts = [commit(sequence, script, []).text for _ in range(6)]
    assert texts == ["a", "b", " ", "", "", "sto"]


def test_characters_split_over_rounds_never_show_as_replacement_characters() -> None:
    text = "ok 🔥 世 é"
    script = list(text.encode())
    for k in range(5):
        sequence = make_sequence(vocabulary=BYTES, max_tokens=len(script), eos=[256], k=k)
        deltas = []
        while sequence.finish_reason is None:
            start = sequence.num_completion_tokens
            deltas.append(commit(sequence, script, script[start : start + sequence.num_draft_tokens()]).text)
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)


def test_an_answer_that_ends_inside_a_character_shows_it_as_one_replacement() -> None:
    script = list("é🔥".encode())
    sequence = make_sequence(vocabulary=BYTES, max_tokens=4, eos=[256], k=8)
    assert commit(sequence, script, script[:3]).text == "é\ufffd"


def test_drafts_are_limited_by_what_is_left_of_max_tokens() -> None:
    sequence = make_sequence(max_tokens=6, k=4)
    assert sequence.num_draft_tokens() == 4
    commit(sequence, letters("abcdef"), [])
    commit(sequence, letters("abcdef"), [])
    assert sequence.num_draft_tokens() == 3
    commit(sequence, letters("abcdef"), letters("cde"))
    assert sequence.num_draft_tokens() == 0


def test_figures_count_by_position_and_leave_fallback_rounds_alone() -> None:
    sequence = make_sequence(max_tokens=20)
    script = letters("abcdefghijklmnopqrst")
    commit(sequence, script, letters("abX"))  # two of three kept, and one token more
    commit(sequence, script, [])
    commit(sequence, script, letters("ef"))
    stats = sequence.stats
    assert (stats.num_rounds, stats.num_draft_tokens, stats.num_accepted) == (3, 5, 4)
    assert stats.num_draft_tokens_per_pos == [2, 2, 1]
    assert stats.num_accepted_per_pos == [2, 2, 0]
    assert stats.num_fallback_rounds == 0
    assert sequence.round == 4


def test_times_run_from_arrival_to_the_first_and_from_the_first_to_the_last_tokens() -> None:
    ticks = iter([10.0, 10.5, 11.0, 13.0])
    sequence = make_sequence(clock=lambda: next(ticks))
    assert sequence.time_to_first_token_s == sequence.generation_s == 0.0
    for _ in range(3):
        commit(sequence, letters("abc"), [])
    assert sequence.time_to_first_token_s == 0.5
    assert sequence.generation_s == 2.5


def test_a_reopened_session_is_told_every_committed_token_and_nothing_else_changes() -> None:
    sequence = make_sequence()
    before = sequence.session_spec()
    commit(sequence, letters("ab"), letters("a"))
    after = sequence.session_spec()
    assert after.token_ids == (*PROMPT, *letters("ab"))
    assert after.prompt_len == before.prompt_len
    assert after.sampling == before.sampling
    assert sequence.tokens.prefix_hash() == HashedTokens(after.token_ids).prefix_hash()


@pytest.mark.parametrize(
    ("ending", "num_tokens"),
    [
        ({"stops": ["ha ha"]}, len("xx ha ha")),
        ({"stops": ["a h"], "include_stop": True}, len("xx ha h")),
        ({"eos": letters("h")}, len("xx h")),
        ({"max_tokens": 9}, 9),
    ],
)
@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_logprobs_are_cut_where_the_tokens_are(ending: dict[str, Any], num_tokens: int, k: int) -> None:
    script = letters("xx ha ha ha ha")
    sequence = make_sequence(logprobs=LogprobsOptions(), k=k, **{"max_tokens": 14, **ending})
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while sequence.finish_reason is None:
        start = sequence.num_completion_tokens
        output = commit(sequence, script, script[start : start + sequence.num_draft_tokens()])
        assert len(output.logprobs) == len(output.token_ids)
        token_ids += output.token_ids
        logprobs += output.logprobs
    assert token_ids == script[:num_tokens]
    assert [entry.logprob for entry in logprobs] == [-1.0 - index for index in range(num_tokens)]


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("num_entries", range(4))
def test_a_verdict_with_another_number_of_logprobs_than_tokens_is_refused(is_asked: bool, num_entries: int) -> None:
    sequence = make_sequence(logprobs=LogprobsOptions() if is_asked else None)
    verdict = Verdict(1, 1, (5, 6), logprobs=(TokenLogprobs(-1.0, 1),) * num_entries)
    due = 2 if is_asked else 0
    if num_entries == due:
        assert sequence.commit(Proposal((5,)), verdict).logprobs == verdict.logprobs
    else:
        with pytest.raises(BadVerdictError, match=f"{num_entries} logprobs where {due} are due"):
            sequence.commit(Proposal((5,)), verdict)
        assert sequence.num_completion_tokens == 0


@pytest.mark.parametrize(
    ("drafts", "verdict"),
    [
        ((), Verdict(0, 0, ())),
        ((), Verdict(0, 0, (5, 6))),
        ((), Verdict(1, 1, (5, 6))),
        ((5,), Verdict(1, 2, (5, 6))),
        ((5,), Verdict(1, 1, (5,))),
        ((5,), Verdict(1, 1, (6, 7))),
        ((5, 6), Verdict(2, 1, (5, 7, 8))),
        ((), Verdict(0, 0, (64,))),
        ((), Verdict(0, 0, (-1,))),
        ((5, 6, 7), Verdict(3, 3, (5, 6, 7, 8))),  # more than max_tokens
        ((), Verdict(0, 0, (5,), FinishReason.STOP)),
        ((), Verdict(0, 0, (5,), FinishReason.ERROR)),
    ],
)
def test_a_verdict_that_cannot_be_is_refused(drafts: tuple[int, ...], verdict: Verdict) -> None:
    sequence = make_sequence(max_tokens=3)
    with pytest.raises(BadVerdictError):
        sequence.commit(Proposal(drafts), verdict)
