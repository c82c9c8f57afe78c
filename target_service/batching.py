"""Continuous batching: which sessions take part in the next step, and with how many rows.

K + 1 rows of a session that is caught up come first, so that a long prompt never holds up a round; what the budget
leaves goes to prompts, in chunks. A share of the budget is kept for prompts, so that many rounds never hold up a
prompt for ever. Each class is served first come, first served.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.sampling.policies import VerifyRows
from target_service.sessions import PendingRound, Session
from target_service.step import StepItem

PREFILL_SHARE = 8  # one row in this many is kept for prompts while there are any


@dataclass(frozen=True, slots=True)
class Part:
    """One session's part of a step: how many committed tokens to append, and the round it decides, if any."""

    session: Session
    num_tokens: int
    verifying: PendingRound | None

    def to_item(self) -> StepItem:
        """What the compute thread needs of it."""
        session, token_ids = self.session, self.session.missing_token_ids(self.num_tokens)
        if self.verifying is None:
            return StepItem(session.sequence_id, session.num_rows, token_ids)
        proposal = self.verifying.proposal
        request = VerifyRows(session.spec, session.tokens.token_ids, proposal)
        return StepItem(session.sequence_id, session.num_rows, [*token_ids, *proposal.draft_token_ids], request)


def choose_parts(sessions: Iterable[Session], max_step_tokens: int) -> list[Part]:
    """The next step's parts, at most `max_step_tokens` rows together; `sessions` in the order they came."""
    caught_up: list[tuple[Session, PendingRound]] = []
    behind: list[Session] = []
    for session in sessions:
        if session.num_missing_rows > 0:
            behind.append(session)
        elif session.pending is not None:
            caught_up.append((session, session.pending))
    caught_up.sort(key=lambda ready: ready[1].arrived_s)
    num_kept = max_step_tokens // PREFILL_SHARE if behind else 0
    parts: list[Part] = []
    num_left = max_step_tokens
    for session, entry in caught_up:
        num_rows = 1 + len(entry.proposal.draft_token_ids)
        if num_rows <= num_left - num_kept or not parts:
            parts.append(Part(session, 1, entry))
            num_left -= num_rows
    for session in behind:
        if num_left == 0:
            break
        part = _prefill_part(session, num_left)
        parts.append(part)
        num_left -= part.num_tokens + (len(part.verifying.proposal.draft_token_ids) if part.verifying else 0)
    return parts


def _prefill_part(session: Session, num_left: int) -> Part:
    """The rest of the prompt together with the round that waits for it, or as much of the prompt as fits."""
    entry, num_missing = session.pending, session.num_missing_rows
    if entry is not None and num_missing + 1 + len(entry.proposal.draft_token_ids) <= num_left:
        return Part(session, num_missing + 1, entry)
    return Part(session, min(num_missing, num_left), None)
