"""The verifier: one forward for the whole batch, then every round's verdict from its K + 1 rows.

Runs on the compute thread and knows of no session table; the engine's sequences are all it changes.
Letters: K draft tokens of a round, T rows whose logits are wanted, V vocabulary.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from engine.backends.base import HiddenCapture, SequenceId, SequenceInput, SpeculativeEngine
from engine.sampling.logprobs import token_logprobs
from engine.sampling.policies import Decision, VerifyRows, rows_of, verify, verify_argmax
from engine.sampling.processors import needs_no_logits, process
from tandem.serving.items import internal_error
from tandem.types import FinishReason, ItemError, LogprobsMode, Verdict
from target_service.hidden_rows import capture_for, with_hidden_states
from target_service.reservation import Grant, Reservation
from target_service.step import StepFailedError, StepOutcome, StepPlan, StepResult

_log = logging.getLogger(__name__)


class Verifier:
    """Computes steps on one engine."""

    def __init__(self, engine: SpeculativeEngine) -> None:
        self._engine = engine

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Release, roll back, reserve memory, forward, decide, truncate to what was committed.

        Raises `StepFailedError` from whatever went wrong; sequences that the step created are then released again,
        and the others' rows are not to be relied on.
        """
        started_ns = time.perf_counter_ns()
        reservation = Reservation(self._engine, plan)
        try:
            for sequence_id in plan.released:
                self._engine.release(sequence_id)
            for item in plan.items:
                if item.sequence_id is not None:
                    self._roll_back(item.sequence_id, item.num_rows)
            grants = reservation.grants()
            capture = capture_for(plan.items)
            decided = iter(self._forward([grant for grant in grants if grant.token_ids], capture))
            outcomes = tuple(self._settle(grant, next(decided) if grant.verify else None) for grant in grants)
            if capture is not None:
                outcomes = tuple(with_hidden_states(plan.items, grants, outcomes, capture))
        except Exception as error:
            for sequence_id in reservation.created:
                self._engine.release(sequence_id)
            raise StepFailedError(tuple(reservation.preempted)) from error
        compute_us = (time.perf_counter_ns() - started_ns) // 1000
        batch_rows = sum(grant.num_appended for grant in grants)
        return StepResult(outcomes, tuple(reservation.preempted), self._engine.kv_usage(), batch_rows, compute_us)

    def _roll_back(self, sequence_id: SequenceId, num_rows: int) -> None:
        """Truncate, when there is anything to drop, so that an engine that cannot may still decode plainly."""
        if self._engine.num_cached_tokens(sequence_id) > num_rows:
            self._engine.truncate(sequence_id, num_rows)
        assert self._engine.num_cached_tokens(sequence_id) == num_rows

    def _forward(self, grants: Sequence[Grant], capture: HiddenCapture | None) -> Sequence[Verdict | ItemError]:
        """One engine call for all that have rows to append -> a verdict for each that verifies, in order."""
        inputs = [
            SequenceInput(grant.sequence_id, grant.appended, grant.verify.num_rows if grant.verify else 0)
            for grant in grants
            if grant.sequence_id is not None
        ]
        requests = [grant.verify for grant in grants if grant.verify]
        if not inputs:
            return []
        if not requests:
            self._engine.advance(inputs, capture)
            return []
        batch_rows = sum(len(entry.token_ids) for entry in inputs)
        if all(needs_no_logits(request.spec, request.row(0).output_len) for request in requests):
            # [T]
            argmax = self._engine.forward_per_position_argmax(inputs, capture)
            return decide_each(argmax, requests, partial(decide_argmax, batch_rows=batch_rows))
        # [T, V]
        logits = self._engine.forward_per_position_logits(inputs, capture)
        return decide_each(logits, requests, partial(decide_logits, batch_rows=batch_rows))

    def _settle(self, grant: Grant, decided: Verdict | ItemError | None) -> StepOutcome:
        """The item's outcome, with the sequence's rows taken back to its verdict."""
        num_rows = grant.num_rows + grant.num_appended
        if grant.verify is not None and grant.sequence_id is not None and isinstance(decided, Verdict):
            num_rows = len(grant.verify.committed_token_ids) + len(decided.token_ids) - 1
            self._roll_back(grant.sequence_id, num_rows)
        return StepOutcome(grant.sequence_id, num_rows, decided, grant.num_found)


def cut(request: VerifyRows, decision: Decision, batch_rows: int = 0) -> Verdict:
    """The round's tokens up to the first that ends the generation, an ending id or the last of max_tokens.

    An ending id ends nothing before min_tokens. `num_accepted` counts delivered drafts only; when the cut falls
    on one, there is no extra token.
    """
    spec, draft_token_ids = request.spec, request.proposal.draft_token_ids
    committed_len = len(request.committed_token_ids)
    decided = (*draft_token_ids[: decision.num_accepted], decision.next_token_id)
    token_ids = decided[: spec.max_len - committed_len]
    finish_reason = FinishReason.LENGTH if committed_len + len(token_ids) == spec.max_len else None
    for index, token_id in enumerate(token_ids):
        output_len = committed_len + index - spec.prompt_len  # before the token
        if token_id in spec.ending_token_ids and output_len >= spec.min_tokens:
            token_ids, finish_reason = token_ids[: index + 1], FinishReason.STOP
            break
    num_accepted = min(decision.num_accepted, len(token_ids))
    return Verdict(len(draft_token_ids), num_accepted, token_ids, finish_reason, batch_rows=batch_rows)


def decide_each(
    rows: torch.Tensor, requests: Sequence[VerifyRows], decide: Callable[[torch.Tensor, VerifyRows], Verdict]
) -> list[Verdict | ItemError]:
    """Every request's verdict from its own rows of [T, ...]: whatever is wrong with one stays with it."""
    decided: list[Verdict | ItemError] = []
    start = 0
    for request in requests:
        try:
            decided.append(decide(rows[start : start + request.num_rows], request))
        except Exception:  # noqa: BLE001 - a bug met by one request must not end its neighbours
            _log.exception("no verdict for a sequence of %d tokens", len(request.committed_token_ids))
            decided.append(internal_error())
        start += request.num_rows
    return decided


def decide_argmax(argmax: torch.Tensor, request: VerifyRows, batch_rows: int) -> Verdict:
    """From the argmax of its rows, int64 [K+1]; ArithmeticError where the engine found no finite logits."""
    if bool((argmax < 0).any()):
        raise ArithmeticError("non-finite logits")
    return cut(request, verify_argmax(argmax, [request])[0], batch_rows)


def decide_logits(logits: torch.Tensor, request: VerifyRows, batch_rows: int) -> Verdict:
    """From raw logits [K+1, V]; ArithmeticError for a row without a finite maximum, before or after processing."""
    _check_finite(logits)
    options = request.spec.logprobs
    # `process` overwrites the raw rows
    raw = logits.clone() if options is not None and options.mode is LogprobsMode.RAW else None
    processed = process(logits, rows_of([request]))
    _check_finite(processed)
    verdict = cut(request, verify(processed, [request])[0], batch_rows)
    if options is None:
        return verdict
    # [N, V]: row i decided token i
    rows = (processed if raw is None else raw)[: len(verdict.token_ids)]
    return replace(verdict, logprobs=token_logprobs(rows, verdict.token_ids, options.num_top))


def _check_finite(logits: torch.Tensor) -> None:
    if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
        raise ArithmeticError("non-finite logits")
