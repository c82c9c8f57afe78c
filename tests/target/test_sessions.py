"""The rules of one session: which items are new, repeated, stale or wrong, and what they do to tokens and rows."""

import pytest

from engine.backends.base import SequenceId
from tandem.serving.items import StaleItemError
from tandem.types import ErrorCode, ItemError, Proposal, Stamp, Verdict
from target_service.sessions import PendingRound, Session
from target_service.step import StepOutcome
from tests.target.harness import STREAM, spec, stamp

PROMPT = (1, 2, 3)


def session(max_tokens: int = 20, epoch: int = 2) -> Session:
    return Session((STREAM, stamp(PROMPT, 0).session_id), epoch, spec(PROMPT, max_tokens), arrival=0)


def entry(tokens: tuple[int, ...], round_number: int) -> PendingRound:
    return PendingRound(stamp(tokens, round_number, epoch=2), Proposal(), arrived_s=0.0)


def decide(subject: Session, tokens: tuple[int, ...], round_number: int, new: tuple[int, ...]) -> Verdict:
    """A round from submit to commit."""
    subject.submit(entry(tokens, round_number))
    subject.begin(subject.pending)
    verdict = Verdict(len(new) - 1, len(new) - 1, new)
    subject.take_over(StepOutcome(SequenceId(1), len(tokens) + len(new) - 1))
    subject.commit(verdict)
    return verdict


def test_a_session_that_has_decided_nothing_takes_its_first_round_as_new() -> None:
    assert session().recorded_verdict(stamp(PROMPT, 1, epoch=2)) is None


def test_a_repeat_of_the_last_round_gives_the_verdict_on_record_and_older_rounds_are_stale() -> None:
    subject = session()
    decide(subject, PROMPT, 1, (4, 5))
    verdict = decide(subject, (*PROMPT, 4, 5), 2, (6,))
    assert subject.recorded_verdict(stamp((*PROMPT, 4, 5), 2, epoch=2)) is verdict
    with pytest.raises(StaleItemError):
        subject.recorded_verdict(stamp(PROMPT, 1, epoch=2))
    assert list(subject.tokens.token_ids) == [*PROMPT, 4, 5, 6]


@pytest.mark.parametrize(
    "tokens", [(1, 2, 9), (1, 2), (1, 2, 3, 4)], ids=["other tokens", "fewer", "its own verdict"]
)
def test_a_repeat_that_was_made_for_other_tokens_than_the_verdict_is_a_mismatch(tokens: tuple[int, ...]) -> None:
    subject = session()
    decide(subject, PROMPT, 1, (4,))
    with pytest.raises(ItemError) as caught:
        subject.recorded_verdict(stamp(tokens, 1, epoch=2))
    assert caught.value.code is ErrorCode.PREFIX_MISMATCH
    assert list(subject.tokens.token_ids) == [*PROMPT, 4]


def test_a_repeat_gives_the_verdict_on_record_after_a_newer_round_went_back_and_was_dropped() -> None:
    subject = session()
    decide(subject, PROMPT, 1, (4, 5))
    verdict = decide(subject, (*PROMPT, 4, 5), 2, (6,))
    subject.submit(entry((*PROMPT, 4), 3))
    subject.pending = None
    assert subject.recorded_verdict(stamp((*PROMPT, 4, 5), 2, epoch=2)) is verdict


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_repeat_of_a_round_that_is_still_worked_on_is_dropped(is_begun: bool) -> None:
    subject = session()
    subject.submit(entry(PROMPT, 1))
    if is_begun:
        subject.begin(subject.pending)
    with pytest.raises(StaleItemError):
        subject.recorded_verdict(stamp(PROMPT, 1, epoch=2))


def test_a_lower_epoch_is_stale_and_a_higher_one_is_unknown() -> None:
    subject = session(epoch=2)
    with pytest.raises(StaleItemError):
        subject.recorded_verdict(stamp(PROMPT, 1, epoch=1))
    with pytest.raises(ItemError, match="UNKNOWN_SESSION"):
        subject.recorded_verdict(stamp(PROMPT, 1, epoch=3))


@pytest.mark.parametrize("tokens", [(1, 2, 9), (1, 2, 3, 4)], ids=["other tokens", "more tokens"])
def test_a_base_the_session_does_not_have_is_a_prefix_mismatch(tokens: tuple[int, ...]) -> None:
    with pytest.raises(ItemError) as caught:
        session().submit(entry(tokens, 1))
    assert caught.value.code is ErrorCode.PREFIX_MISMATCH


@pytest.mark.parametrize("committed_len", [1, 2, 5])
def test_a_base_inside_the_prompt_or_at_the_end_of_max_tokens_is_refused_with_the_limits(
    committed_len: int,
) -> None:
    subject = session(max_tokens=2)
    decide(subject, PROMPT, 1, (4, 5))
    tokens = (*PROMPT, 4, 5)[:committed_len]
    with pytest.raises(ItemError, match=rf"committed_len: {committed_len} is outside 3\.\.4") as caught:
        subject.submit(entry(tokens, 2))
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT


def test_a_new_round_takes_tokens_and_rows_back_to_its_base_absolutely() -> None:
    subject = session()
    decide(subject, PROMPT, 1, (4, 5, 6))
    assert (len(subject.tokens), subject.num_rows) == (6, 5)
    subject.submit(entry((*PROMPT, 4), 2))
    assert (list(subject.tokens.token_ids), subject.num_rows) == ([*PROMPT, 4], 3)
    subject.submit(entry((*PROMPT, 4), 3))
    assert (list(subject.tokens.token_ids), subject.num_rows) == ([*PROMPT, 4], 3)


def test_a_round_that_comes_while_another_is_decided_is_checked_after_that_verdict() -> None:
    subject = session()
    subject.submit(entry(PROMPT, 1))
    subject.begin(subject.pending)
    subject.submit(entry((*PROMPT, 4), 2))  # the session has no fourth token yet
    subject.take_over(StepOutcome(SequenceId(1), 4))
    subject.commit(Verdict(1, 1, (4, 5)))
    subject.settle()
    assert subject.pending is not None
    assert (list(subject.tokens.token_ids), subject.num_rows) == ([*PROMPT, 4], 3)


def test_a_wrong_round_that_came_during_a_step_is_forgotten_when_it_is_refused() -> None:
    subject = session()
    subject.submit(entry(PROMPT, 1))
    subject.begin(subject.pending)
    subject.submit(entry((*PROMPT, 9), 2))
    subject.take_over(StepOutcome(SequenceId(1), 3))
    subject.commit(Verdict(0, 0, (4,)))
    with pytest.raises(ItemError, match="PREFIX_MISMATCH"):
        subject.settle()
    assert subject.pending is None


def test_a_rollback_during_a_prefill_keeps_no_more_rows_than_it_allows() -> None:
    subject = session()
    decide(subject, PROMPT, 1, (4, 5, 6))
    subject.num_rows = 0  # as after a re-open
    subject.begin(None)
    subject.submit(entry((*PROMPT, 4), 2))
    subject.take_over(StepOutcome(SequenceId(1), 5))
    assert not subject.defer()
    assert subject.num_rows == 3


def test_a_round_for_which_there_was_no_memory_waits_on_unless_a_newer_one_has_come() -> None:
    for is_newer in (False, True):
        subject = session()
        subject.submit(entry(PROMPT, 1))
        subject.begin(subject.pending)
        if is_newer:
            subject.submit(entry(PROMPT, 2))
        subject.take_over(StepOutcome(None, 0))
        assert subject.defer() == is_newer
        assert subject.pending is not None
        assert subject.pending.stamp.round == 1 + is_newer
        assert (subject.verifying, subject.sequence_id, subject.num_rows) == (None, None, 0)


def test_a_session_that_lost_its_rows_has_its_tokens_and_its_verdict() -> None:
    subject = session()
    verdict = decide(subject, PROMPT, 1, (4, 5))
    subject.lose_rows()
    assert (subject.sequence_id, subject.num_rows, subject.num_missing_rows) == (None, 0, 4)
    assert subject.recorded_verdict(stamp(PROMPT, 1, epoch=2)) is verdict
    assert list(subject.uncomputed_token_ids()) == [*PROMPT, 4, 5]


@pytest.mark.parametrize(
    ("committed_len", "most", "expected"), [(3, 16, 6), (3, 4, 4), (3, 0, 0), (7, 16, 5), (10, 16, 2), (12, 16, 0)]
)
def test_drafts_are_clamped_to_what_generation_and_service_leave_room_for(
    committed_len: int, most: int, expected: int
) -> None:
    subject = session(max_tokens=10)
    assert subject.clamp(Proposal((7,) * 6), committed_len, most).draft_token_ids == (7,) * expected


def test_round_zero_is_refused() -> None:
    with pytest.raises(ItemError, match=r"stamp\.round"):
        session().recorded_verdict(Stamp(stamp(PROMPT, 0).session_id, 2, 0, 3, 0))
