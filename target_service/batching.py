"""Continuous batching: which sessions take part in the next step, and with how many rows at most.

Rounds of sessions that are caught up come first, so that a long prompt never holds up a round; what the budget leaves
goes to prompts, in chunks. While anybody decodes, prompts have only so many rows of a step, because a long step holds
up the rounds that arrive during it. A share of the budget is kept for prompts, so that many rounds never hold up a
prompt for ever. Replays of hidden states come last: beside no prompt, and with few rows while anybody decodes. All are
served in turn (ordering.py); whether there is memory for a part is decided later, in the step (reservation.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.row_shares import even_shares
from engine.sampling.policies import VerifyRows
from target_service.limits import Limits
from target_service.ordering import by_arrival, by_round, in_turn
from target_service.sessions import PendingRound, Session
from target_service.step import StepItem

PREFILL_SHARE = 8  # one row in this many is kept for prompts while there are any
REPLAY_SHARE = 4  # while anybody decodes, replays have one in so many of the rows that prompts could have
NUM_SHARING = 4  # prompts that share a step's rows for prompts evenly: a short one does not wait for a long one


@dataclass(frozen=True, slots=True)
class Part:
    """One session's part of a step: at most `max_rows` rows, and the round it decides if that fits, if there is one."""

    session: Session
    max_rows: int
    verifying: PendingRound | None

    @property
    def num_drafts(self) -> int:
        """Of its round, as far as the step has room for them."""
        return min(self.verifying.num_drafts, self.max_rows - 1) if self.verifying else 0

    def to_item(self, rank: int) -> StepItem:
        """What the compute thread needs of it."""
        session, request = self.session, None
        if self.verifying is not None:
            proposal = self.verifying.proposal.first(self.num_drafts)
            request = VerifyRows(session.spec, session.tokens.token_ids, proposal)
        return StepItem(
            session.sequence_id,
            session.num_rows,
            session.uncomputed_token_ids(),
            self.max_rows,
            request,
            rank,
            session.first_hidden_row if session.replay else None,
            session.hidden_layers,
            session.first_hidden_row,
        )


def choose_parts(sessions: Sequence[Session], limits: Limits, cached_block_size: int | None) -> list[Part]:
    """The next step's parts: at most `max_batch`, with at most `max_step_tokens` rows together.

    Args:
        sessions: the running ones.
        cached_block_size: tokens of a block of the prefix cache; None where there is none.
    """
    decoding = [session for session in sessions if session.is_caught_up]
    behind = in_turn((session for session in sessions if not session.is_caught_up), by_arrival)
    prompts = [session for session in behind if not session.replay]
    prefilling = list(_without_same_prompts(prompts, cached_block_size)) or behind
    max_prefill = limits.prefill_tokens if decoding else limits.max_step_tokens
    num_kept = min(max_prefill, max(1, limits.max_step_tokens // PREFILL_SHARE)) if prompts else 0
    if decoding and not prompts:
        max_prefill = max(1, max_prefill // REPLAY_SHARE)
    parts = _rounds(
        [session for session in decoding if session.pending is not None],
        limits.max_step_tokens - num_kept,
        limits.batch_size - bool(prompts),
    )
    num_left = limits.max_step_tokens - sum(part.max_rows for part in parts)
    return parts + _prefills(prefilling[: limits.batch_size - len(parts)], min(num_left, max_prefill))


def _rounds(sessions: list[Session], max_rows: int, max_parts: int) -> list[Part]:
    """K + 1 rows each while they fit; the first one has as many drafts as there is room for."""
    parts: list[Part] = []
    num_left = max_rows
    for session in in_turn(sessions, by_round):
        assert session.pending is not None
        num_rows = 1 + session.pending.num_drafts
        if not parts:
            num_rows = min(num_rows, num_left)
        if num_rows <= num_left and len(parts) < max_parts:
            parts.append(Part(session, num_rows, session.pending))
            num_left -= num_rows
    return parts


def _without_same_prompts(behind: list[Session], cached_block_size: int | None) -> Iterator[Session]:
    """Leave out who has not begun and will find its prompt's rows in the cache once somebody before it is done."""
    prompts: set[tuple[int, int]] = set()
    for session in behind:
        is_shareable = cached_block_size is not None and session.spec.prompt_len > cached_block_size
        if is_shareable and session.sequence_id is None and session.prompt_key in prompts:
            continue
        if session.num_rows < session.spec.prompt_len - 1:
            prompts.add(session.prompt_key)
        yield session


def _prefills(sessions: list[Session], max_rows: int) -> list[Part]:
    """The rest of each prompt together with the round that waits for it, or as much of the prompt as its share holds.

    What is in the cache for a session that has not begun is not known yet: its round may take part in any case.
    """
    wanted = [
        session.num_missing_rows + (1 + session.pending.num_drafts if session.pending else 0)
        for session in sessions
    ]
    parts = []
    for session, num_wanted, share in zip(sessions, wanted, shares(max_rows, wanted), strict=False):
        is_whole = share == num_wanted or session.sequence_id is None
        parts.append(Part(session, share, session.pending if is_whole else None))
    return parts


def shares(total: int, wanted: Sequence[int]) -> list[int]:
    """Rows for each as far as there are any: the first few share evenly, what they leave goes to the next in turn."""
    first = wanted[: min(NUM_SHARING, total)]
    result = even_shares(first, total)
    total -= sum(result)
    for num_wanted in wanted[len(first) :]:
        if total == 0:
            break
        result.append(min(num_wanted, total))
        total -= result[-1]
    return result
