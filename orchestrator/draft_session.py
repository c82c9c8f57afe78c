"""One request's session at the draft service. It can only save time, so nothing that happens to it is an error.

Whatever goes wrong, the round is answered at once, or when the wait is over, with drafts from the sequence itself
(prompt lookup) or none, and counted as a fallback. Rounds never wait twice for the same trouble: while an answer is
late, or a session is being opened again, they go on so.
"""

import asyncio
import time
from typing import NoReturn

import numpy as np

from orchestrator.draft_length import DraftLength
from orchestrator.hidden_relay import HiddenRelay
from orchestrator.replica_link import LinkLostError
from orchestrator.round_times import LONGEST_S
from orchestrator.sequence import Sequence
from orchestrator.session_handle import SessionHandle, answer_of
from tandem import codec
from tandem.common.v1 import common_pb2
from tandem.draft.v1 import draft_pb2
from tandem.prompt_lookup import PromptLookup
from tandem.types import DraftProbs, DraftProbsTransport, ErrorCode, ItemError, Proposal

_EMPTY = Proposal()
_MAX_SKIPPED_ROUNDS = 64  # after several failures in a row
_FINAL_CODES = {ErrorCode.INVALID_ARGUMENT, ErrorCode.UNIMPLEMENTED}  # asking again would change nothing


class NoDrafts:
    """The `ProposerSession` of a request that does not speculate: no traffic, no figures."""

    async def propose(self, sequence: Sequence) -> Proposal:  # noqa: ARG002 - the protocol's
        return _EMPTY

    def close(self, sequence: Sequence) -> None:
        """There is nothing to free."""


class _NoProposalError(Exception):
    """This round goes without drafts; nothing new happened."""


class _NotYetError(Exception):
    """The service could not draft yet: it lacks hidden states, which are on their way."""


class DraftSession:
    """The `ProposerSession` of one request."""

    def __init__(
        self,
        handle: SessionHandle[draft_pb2.ProposeItem, draft_pb2.ProposeResult],
        vocab_size: int,
        *,
        timeout_s: float | None = None,
        relay: HiddenRelay | None = None,
        fallback: PromptLookup | None = None,
        length: DraftLength | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            vocab_size: drafts must be below it.
            timeout_s: longest wait of a round; None: what the replica's rounds have taken so far says how long.
            relay: has the hidden states that the service needs; None when it needs none.
            fallback: makes drafts while the service makes none; None: there are none then.
            length: how many drafts a round is worth; None: as many as are wanted.
        """
        self._handle = handle
        self._timeout_s = timeout_s
        self._vocab_size = vocab_size
        self._relay = relay
        self._fallback = fallback
        self._length = length
        self._known_len = 0  # tokens the service surely has
        self._first_open: asyncio.Future[draft_pb2.ProposeResult] | None = None  # until a proposal came
        self._background: asyncio.Future[draft_pb2.ProposeResult] | None = None  # an answer no round waits for
        self._background_until = 0.0  # on the monotonic clock: when it counts as lost
        self._num_failures = 0  # in a row
        self._num_rounds_to_skip = 0
        self._has_given_up = False

    async def propose(self, sequence: Sequence) -> Proposal:
        """At most `sequence.num_draft_tokens()` drafts; empty, and counted, when the service fails or is late.

        Empty without a count where none are worth it.
        """
        num_wanted = sequence.num_draft_tokens()
        if self._length is not None:
            num_wanted = self._length.most(num_wanted)
        if num_wanted == 0:
            self._handle.move_if_leaving(
                sequence
            )  # a replica that waits for its last session must not wait for this
            return _EMPTY
        started = time.monotonic()
        try:
            proposal = await self._propose(sequence, num_wanted)
        except _NotYetError:
            return self._own_drafts(sequence, num_wanted)
        except (_NoProposalError, TimeoutError, LinkLostError, ItemError) as error:
            sequence.stats.num_fallback_rounds += 1
            self._note(error)
            return self._own_drafts(sequence, num_wanted)
        finally:
            sequence.stats.draft_wait_s += time.monotonic() - started
        self._num_failures = 0
        return proposal

    def close(self, sequence: Sequence) -> None:
        """Free the session."""
        self._handle.close(sequence)

    def _own_drafts(self, sequence: Sequence, num_wanted: int) -> Proposal:
        """Copied from the sequence: they depend on nothing that was drawn for them, so q is one-hot."""
        if self._fallback is None:
            return _EMPTY
        drafts = tuple(self._fallback.find(sequence.tokens.token_ids, num_wanted))
        probs: tuple[DraftProbs, ...] = ()
        if sequence.draft_probs_transport in (DraftProbsTransport.SPARSE, DraftProbsTransport.FULL):
            probs = tuple(
                DraftProbs(np.array([one], dtype=np.uint32), np.ones(1, dtype=np.float32)) for one in drafts
            )
        return Proposal(drafts, probs)

    async def _propose(self, sequence: Sequence, num_wanted: int) -> Proposal:
        self._check_ready(sequence)
        self._handle.move_if_leaving(sequence)
        if self._handle.needs_open:
            is_first = self._handle.epoch == 0
            opening = self._handle.open(sequence)
            self._known_len = len(sequence.tokens)
            if self._relay is not None:
                self._relay.restart()
            if not is_first:
                self._leave_to_background(opening)
                raise _NoProposalError
            self._first_open = opening
        self._send_hidden_states(sequence)
        asked_s = time.monotonic()
        future = self._handle.request(self._step_item(sequence, num_wanted))
        try:
            result = await self._answer(future)
        except TimeoutError:
            self._leave_to_background(future)
            raise
        except ItemError as error:
            self._raise_cause(error)
        self._first_open = None
        self._known_len = len(sequence.tokens)
        sequence.stats.draft_timing += codec.timing_from_proto(result.timing).within(time.monotonic() - asked_s)
        return self._checked(result.proposal, num_wanted)

    async def _answer(self, future: "asyncio.Future[draft_pb2.ProposeResult]") -> draft_pb2.ProposeResult:
        """The round's proposal; raises as `answer_of`. The replica's times are learned from rounds but the first."""
        assert self._handle.link is not None
        times = self._handle.link.round_times
        is_first, started = self._first_open is not None, time.monotonic()
        timeout_s = self._timeout_s or (LONGEST_S if is_first else times.limit_s)
        try:
            result = await answer_of(future, self._handle.deadline.remaining_s(timeout_s), "draft", "proposal")
        except TimeoutError:
            times.was_late()
            self._handle.link.breaker.failed()
            raise
        self._handle.link.breaker.worked()
        if not is_first:
            times.took(time.monotonic() - started)
        return result

    def _send_hidden_states(self, sequence: Sequence) -> None:
        """All that are here and not there; _NotYetError while the round's are not complete."""
        if self._relay is None:
            return
        assert self._handle.link is not None
        for states in self._relay.rows_to_send(sequence):
            item = self._handle.step_item(sequence)
            item.hidden_states.CopyFrom(codec.hidden_states_to_proto(states))
            self._handle.link.send(item)
        if not self._relay.is_complete(sequence):
            raise _NotYetError

    def _check_ready(self, sequence: Sequence) -> None:
        """_NoProposalError while there is a reason not to ask; LinkLostError or ItemError for news of one."""
        if self._has_given_up or (self._handle.needs_open and self._handle.next_place() is None):
            raise _NoProposalError
        if self._num_rounds_to_skip > 0:
            self._num_rounds_to_skip -= 1
            raise _NoProposalError
        waited_for = self._background
        if waited_for is None:
            return
        if not waited_for.done() and time.monotonic() < self._background_until:
            raise _NoProposalError
        self._background = None
        if not waited_for.done():
            self._handle.avoid(sequence)
            raise ItemError(ErrorCode.UNKNOWN_SESSION, "the answer never came")
        _raise_error_of(waited_for)

    def _leave_to_background(self, future: "asyncio.Future[draft_pb2.ProposeResult]") -> None:
        """Rounds go on without it until the answer has come, or the wait has passed once more."""
        assert self._handle.link is not None
        limit_s = self._timeout_s or self._handle.link.round_times.limit_s
        self._background, self._background_until = future, time.monotonic() + limit_s

    def _raise_cause(self, error: ItemError) -> NoReturn:
        """Raise why the session is unknown, when the first open that failed says so; else the error itself."""
        if error.code is ErrorCode.UNKNOWN_SESSION and self._first_open is not None and self._first_open.done():
            _raise_error_of(self._first_open)
        raise error

    def _step_item(self, sequence: Sequence, num_wanted: int) -> draft_pb2.ProposeItem:
        item = self._handle.step_item(sequence)
        item.propose.tail_start = self._known_len
        item.propose.committed_token_ids.extend(sequence.tokens.token_ids[self._known_len :])
        assert self._handle.link is not None
        info = self._handle.link.info
        limit = info.model.max_draft_tokens if info is not None else 0
        item.propose.num_draft_tokens = min(num_wanted, limit) if limit else num_wanted
        return item

    def _checked(self, message: common_pb2.Proposal, num_wanted: int) -> Proposal:
        """The proposal, if the target may see it; ItemError for one no correct draft service makes.

        INTERNAL for too many drafts, before any is looked at: they could hold the event loop for seconds.
        """
        num_drafts = len(message.draft_token_ids)
        if num_drafts > num_wanted:
            raise ItemError(ErrorCode.INTERNAL, f"{num_drafts} drafts where at most {num_wanted} were wanted")
        proposal = codec.proposal_from_proto(message)
        for token_id in proposal.draft_token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ItemError(
                    ErrorCode.INTERNAL, f"draft token id {token_id} is outside 0..{self._vocab_size - 1}"
                )
        return proposal

    def _note(self, error: Exception) -> None:
        """Decide when, if ever, to ask or to open the session again."""
        if isinstance(error, _NoProposalError):
            return
        self._num_rounds_to_skip = min(2**self._num_failures - 1, _MAX_SKIPPED_ROUNDS)
        self._num_failures = min(self._num_failures + 1, 16)
        if isinstance(error, TimeoutError):
            return
        self._first_open = self._background = None
        if isinstance(error, ItemError):
            self._has_given_up = error.code in _FINAL_CODES
        self._handle.mark_lost()


def _raise_error_of(answered: "asyncio.Future[draft_pb2.ProposeResult]") -> None:
    """Raise LinkLostError or the service's ItemError, if that is what the answer is."""
    result = answered.result()
    if result.WhichOneof("outcome") == "error":
        raise codec.error_from_proto(result.error)
