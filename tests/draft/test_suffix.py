"""Proposer `suffix`: the longer the match the longer the draft, by what followed most often, and never the text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.proposers.base import ProposeInput, Proposer, SessionKey
from draft_service.proposers.kind import ProposerError
from draft_service.proposers.registry import load_proposer
from draft_service.proposers.suffix import DraftLength, SuffixProposer
from draft_service.proposers.suffix_memory import SuffixMemory
from tandem.types import Proposal, SessionSpec, VerificationPolicy
from tests.draft.pages import page
from tests.draft.replay import report
from tests.draft.support import coupled_spec, decide, make_spec
from tests.every_proposer import own_options

RULE = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def make_proposer(max_tokens: int = 10_000, keeps_outputs: bool = True, **length: Any) -> SuffixProposer:
    return SuffixProposer(SuffixMemory(max_tokens, keeps_outputs=keeps_outputs), DraftLength(**length))


def drafts(
    token_ids: Sequence[int],
    num_draft_tokens: int = 16,
    proposer: Proposer | None = None,
    key: int = 1,
    spec: SessionSpec | None = None,
) -> list[int]:
    """What a session with these tokens is drafted."""
    item = ProposeInput(SessionKey(key), spec or make_spec([0]), tuple(token_ids), num_draft_tokens)
    (proposal,) = (proposer or make_proposer()).propose([item])
    assert proposal is not None
    return list(proposal.draft_token_ids)


def end_session(proposer: SuffixProposer, token_ids: Sequence[int], key: int = 7) -> None:
    """A session of prompt 0 that had these tokens as its output."""
    drafts([0, *token_ids], proposer=proposer, key=key)
    proposer.forget(SessionKey(key))


def test_the_longer_the_match_the_longer_the_draft_and_never_more_than_was_asked_for() -> None:
    assert drafts([*RULE, 0, 1]) == [2, 3, 4]
    assert drafts([*RULE, 0, 1, 2]) == [3, 4, 5, 6, 7, 8]
    assert drafts([*RULE, 0, 1, 2], num_draft_tokens=4) == [3, 4, 5, 6]
    assert drafts([*RULE, 0, 1], proposer=make_proposer(drafts_per_match=1.5)) == [2, 3]
    assert drafts([*RULE, 0]) == []


def test_what_followed_most_often_is_drafted_and_of_equals_what_followed_last() -> None:
    assert drafts([5, 1, 5, 1, 5, 2, 0, 5], 1) == [1]
    assert drafts([5, 1, 9, 5, 2, 8, 5], 1) == [2]


def test_drafts_end_where_they_become_unlikely() -> None:
    half_and_half = [5, 6, 1, 7, 5, 6, 2, 8, 5]
    assert drafts(half_and_half, proposer=make_proposer(min_draft_share=0.5)) == [6, 2, 8]
    assert drafts(half_and_half, proposer=make_proposer(min_draft_share=0.51)) == [6]


def test_the_longest_match_decides_against_a_more_frequent_shorter_one() -> None:
    assert drafts([4, 5, 1, 5, 2, 5, 2, 5, 2, 0, 4, 5], 1) == [1]


def test_text_that_repeats_itself_is_drafted_past_its_own_end() -> None:
    assert drafts([7, 7, 7], 8) == [7, 7, 7, 7, 7, 7]
    assert drafts([1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_an_output_of_an_ended_session_is_drafted_from_but_not_that_of_an_open_one() -> None:
    proposer = make_proposer()
    drafts([0, *RULE], proposer=proposer, key=7)
    assert drafts([0, 1, 2], proposer=proposer) == []
    proposer.forget(SessionKey(7))
    assert drafts([0, 1, 2], proposer=proposer) == [3, 4, 5, 6, 7, 8]
    assert drafts([0, 1, 2, 3], proposer=proposer) == [4, 5, 6, 7, 8, 9]


def test_of_several_places_the_longest_match_is_drafted_from_then_the_one_that_promises_most_then_its_own() -> None:
    proposer = make_proposer()
    end_session(proposer, [1, 2, 3, 4])
    assert drafts([9, 2, 8, 0, 1, 2], 4, proposer) == [3, 4]  # two tokens match there, and one here
    assert drafts([1, 2, 8, 1, 2, 7, 0, 1, 2], 2, proposer, key=2) == [3, 4]  # half of the time here
    assert drafts([1, 2, 8, 7, 0, 1, 2], 2, proposer, key=3) == [8, 7]


def test_a_match_that_nothing_follows_makes_way_for_a_shorter_one_elsewhere() -> None:
    proposer = make_proposer()
    end_session(proposer, [1, 2])
    assert drafts([9, 2, 8, 0, 1, 2], 1, proposer) == [8]


@pytest.mark.parametrize("policy", [VerificationPolicy.REJECTION, VerificationPolicy.BLOCK])
def test_under_a_ratio_test_drafts_know_nothing_of_outputs_which_may_tell_of_the_sessions_own_noise(
    policy: VerificationPolicy,
) -> None:
    proposer = make_proposer()
    end_session(proposer, RULE)
    ratio = make_spec([0], policy=policy, temperature=1.0)
    assert drafts([0, 1, 2], proposer=proposer, spec=ratio) == []
    assert drafts([1, 2, 8, 1, 2], 1, proposer, key=2, spec=ratio) == [8]
    assert drafts([0, 1, 2], proposer=proposer, key=3, spec=coupled_spec([0])) == [3, 4, 5, 6, 7, 8]
    greedy = make_spec([0], policy=policy, temperature=0.0)  # whatever policy was named
    assert drafts([0, 1, 2], proposer=proposer, key=4, spec=greedy) == [3, 4, 5, 6, 7, 8]


def test_drafting_from_an_output_of_the_same_seed_under_a_ratio_test_would_give_one_token_for_two_likely_ones() -> (
    None
):
    """Why outputs are kept from them: each output alone is half 0 and half 1, the second one would always be 0."""
    second = []
    for seed in range(50):
        spec = make_spec([0], policy=VerificationPolicy.REJECTION, temperature=1.0, seed=seed)
        draft = 0
        for _ in ("one request", "the same again, drafting what that gave"):
            decision = decide(lambda _: np.zeros(2, np.float32), spec, [0], Proposal((draft,)))
            draft = draft if decision.num_accepted else decision.next_token_id
        second.append(draft)
    assert set(second) == {0}


def test_a_session_that_keeps_to_its_own_tokens_sees_nothing_of_others() -> None:
    for arguments, expected in ((["--own-tokens-only"], []), ([], [3, 4, 5, 6, 7, 8])):
        proposer = load_proposer("suffix", own_options(*arguments))
        assert isinstance(proposer, SuffixProposer)
        end_session(proposer, RULE)
        assert drafts([0, 1, 2], proposer=proposer) == expected


histories = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=8)


@given(histories, st.booleans())
def test_whatever_a_session_had_before_its_drafts_are_those_of_the_tokens_it_has_now(
    history: list[list[int]], grows: bool
) -> None:
    proposer = make_proposer(keeps_outputs=False)
    token_ids: list[int] = []
    for tokens in history:
        token_ids = [*token_ids, *tokens] if grows else tokens
        assert drafts(token_ids, proposer=proposer) == drafts(token_ids)


def test_sessions_of_a_batch_are_drafted_for_each_by_itself() -> None:
    texts = [[*RULE, 0, 1], [5, 5], [3]]
    batch = [ProposeInput(SessionKey(key), make_spec([0]), tuple(text), 3) for key, text in enumerate(texts)]
    assert make_proposer().propose(batch) == [Proposal((2, 3, 4)), Proposal((5, 5, 5)), Proposal()]


def test_a_long_prompt_is_read_in_parts_while_others_are_drafted_for() -> None:
    proposer = make_proposer(100_000)
    long = [*range(10_000), *range(8_000)]
    batch = [
        ProposeInput(SessionKey(1), make_spec([0]), tuple(long), 3),
        ProposeInput(SessionKey(2), make_spec([0]), tuple(RULE[:2] * 2), 3),
    ]
    answers = [proposer.propose(batch) for _ in range(3)]
    assert [long for long, _ in answers] == [None, None, Proposal((8_000, 8_001, 8_002))]
    assert {short for _, short in answers} == {Proposal((1, 2, 1))}


def test_without_room_there_are_no_drafts_until_another_session_has_ended() -> None:
    proposer = make_proposer(20, keeps_outputs=False)
    assert drafts([1, 2] * 6, 2, proposer, key=1) == [1, 2]
    assert drafts([1, 2] * 6, 2, proposer, key=2) == []
    proposer.forget(SessionKey(1))
    assert drafts([1, 2] * 6, 2, proposer, key=2) == [1, 2]


def test_the_documented_figures_are_what_a_replay_of_recorded_tokens_gives() -> None:
    assert report() in page("suffix.md")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--max-suffix-tokens", "0"], "--max-suffix-tokens 0 is less than 1"),
        (["--drafts-per-match", "0"], r"--drafts-per-match: 0.0 is outside \[0.01, 100\]"),
        (["--min-draft-share", "1.5"], r"--min-draft-share: 1.5 is outside \[0, 1\]"),
    ],
)
def test_what_cannot_be_is_refused_by_option_and_limit(arguments: list[str], problem: str) -> None:
    with pytest.raises(ProposerError, match=f"'suffix': {problem}"):
        load_proposer("suffix", own_options(*arguments))
