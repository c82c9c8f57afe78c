"""The verifier: cuts at endings, one forward a step, errors that stay alone."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.backends.base import HiddenCapture, SequenceInput
from engine.backends.toy_backend import LogitsOf, ToyEngine
from engine.sampling.policies import Decision, VerifyRows
from engine.sampling.processors import process
from engine.sampling.rows import Row
from tandem.rng import F32
from tandem.types import FinishReason, ItemError, Proposal, SamplingParams, Verdict, VerificationPolicy
from target_service import verifier
from target_service.step import StepFailedError, StepItem, StepPlan
from target_service.verifier import Verifier, cut
from tests.target.harness import LOGITS, VOCAB, Bench, plain_decode, spec, stamp, toy

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = frozenset({30})


@pytest.mark.parametrize(
    ("drafts", "decision", "changes", "tokens", "num_accepted", "reason"),
    [
        ((4, 5), Decision(2, 6), {}, (4, 5, 6), 2, None),
        ((4, 5), Decision(0, 6), {}, (6,), 0, None),
        ((), Decision(0, 30), {}, (30,), 0, STOP),
        ((4, 30, 5), Decision(3, 6), {}, (4, 30), 2, STOP),
        ((30, 4), Decision(2, 6), {}, (30,), 1, STOP),
        ((4, 30), Decision(1, 6), {}, (4, 6), 1, None),
        ((4, 5), Decision(2, 30), {}, (4, 5, 30), 2, STOP),
        ((4, 30, 5), Decision(3, 6), {"min_tokens": 2}, (4, 30, 5, 6), 3, None),
        ((4, 30, 5), Decision(3, 6), {"min_tokens": 1}, (4, 30), 2, STOP),
        ((4, 30, 5), Decision(3, 6), {"eos_token_ids": frozenset()}, (4, 30, 5, 6), 3, None),
        ((4, 30, 5), Decision(3, 6), {"eos_token_ids": frozenset(), "stop_token_ids": EOS}, (4, 30), 2, STOP),
        ((4, 5), Decision(2, 6), {"max_tokens": 3}, (4, 5, 6), 2, LENGTH),
        ((4, 5), Decision(1, 6), {"max_tokens": 3}, (4, 6), 1, None),
        ((4, 5), Decision(2, 6), {"max_tokens": 2}, (4, 5), 2, LENGTH),
        ((4, 5), Decision(2, 30), {"max_tokens": 3}, (4, 5, 30), 2, STOP),
    ],
)
def test_tokens_end_at_the_first_ending_id_or_the_last_of_max_tokens(
    drafts: tuple[int, ...],
    decision: Decision,
    changes: dict[str, object],
    tokens: tuple[int, ...],
    num_accepted: int,
    reason: FinishReason | None,
) -> None:
    session = spec(**{"max_tokens": 20, "eos_token_ids": EOS, **changes})  # type: ignore[arg-type]
    verdict = cut(VerifyRows(session, session.token_ids, Proposal(drafts)), decision)
    assert verdict == Verdict(len(drafts), num_accepted, tokens, reason)


def test_sessions_with_different_numbers_of_drafts_share_one_forward_and_decide_as_alone() -> None:
    def decide(together: bool) -> tuple[list[Verdict], int]:
        bench = Bench()
        sessions = {number: spec((number, 2, 3), eos_token_ids=EOS) for number in range(1, 9)}
        for number, session in sessions.items():
            bench.open(session, number)
        bench.settle()
        num_calls, verdicts = len(bench.engine.calls), []
        for number, session in sessions.items():
            right = plain_decode(session, most=6)
            drafts = [*right[: number // 2], *([0] * (number - number // 2 - 1))]
            bench.submit(stamp(session.token_ids, 1, number), drafts)
            if not together:
                verdicts += [answer.outcome for answer in bench.settle()]
        verdicts += [answer.outcome for answer in bench.settle()]
        return verdicts, len(bench.engine.calls) - num_calls  # type: ignore[return-value]

    together, num_together = decide(together=True)
    alone, num_alone = decide(together=False)
    assert (num_together, num_alone) == (1, 8)
    assert [(v.num_draft_tokens, v.num_accepted, v.token_ids) for v in together] == [
        (v.num_draft_tokens, v.num_accepted, v.token_ids) for v in alone
    ]
    assert {v.num_draft_tokens for v in together} == set(range(8))
    assert {v.batch_rows for v in together} == {sum(range(1, 9))}


def test_only_a_step_of_plain_greedy_rounds_takes_the_argmax_path() -> None:
    bench = Bench()
    for number, sampling in enumerate((0.0, 0.8), 1):
        bench.open(spec(sampling=SamplingParams(temperature=sampling, seed=1)), number)
    bench.open(spec(sampling=SamplingParams(temperature=0.0, frequency_penalty=1.0, seed=1)), 3)
    bench.settle()
    kinds = []
    for number in (1, 2, 3):
        bench.round([1, 2, 3], 1, session=number)
        kinds.append(bench.engine.calls[-1].kind)
    assert kinds == ["argmax", "logits", "logits"]


@pytest.mark.parametrize("min_tokens", range(7))
def test_min_tokens_holds_an_ending_back_to_the_same_index_with_and_without_drafts(min_tokens: int) -> None:
    first = plain_decode(spec(max_tokens=8))
    session = spec(max_tokens=12, min_tokens=min_tokens, eos_token_ids=frozenset({first[1]}))
    plain = plain_decode(session)
    for num_drafts in (0, 4):
        bench = Bench()
        bench.open(session)
        tokens, number, reason = [1, 2, 3], 0, None
        while reason is None:
            number += 1
            done = len(tokens) - 3
            reason = bench.round(tokens, number, [*plain, first[1]][done : done + num_drafts]).finish_reason
        assert tokens[3:] == plain
    assert first[1] not in plain[:min_tokens]


def broken_after(prefix: Sequence[int], value: float) -> LogitsOf:
    """The usual logits, but for sequences that begin with `prefix`."""

    def logits_of(token_ids: Sequence[int]) -> F32:
        if list(token_ids[: len(prefix)]) == list(prefix):
            return np.full(VOCAB, value, dtype=np.float32)
        return LOGITS(token_ids)

    return logits_of


@pytest.mark.parametrize("neighbours_temperature", [0.0, 0.7])
@pytest.mark.parametrize("policy", VerificationPolicy)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_fail_their_own_session_only(
    value: float, policy: VerificationPolicy, neighbours_temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(toy(broken_after((7, 7), value)))
    sampling = SamplingParams(temperature=0.0 if policy is VerificationPolicy.GREEDY else 0.7, top_p=0.9, seed=3)
    good = spec((1, 2), sampling=SamplingParams(temperature=neighbours_temperature, top_p=0.9, seed=3))
    bad = spec((7, 7), sampling=sampling, verification_policy=policy)
    for number, session in ((1, good), (2, bad), (3, good)):
        bench.open(session, number)
        bench.submit(stamp(session.token_ids, 1, number), (4, 5))
    outcomes = {answer.stamp.session_id: answer.outcome for answer in bench.settle()}
    assert isinstance(outcomes[2], ItemError)  # type: ignore[index]
    assert str(outcomes[2]) == "INTERNAL: internal error"  # type: ignore[index]
    expected = plain_decode(good, most=1)
    for number in (1, 3):
        verdict = outcomes[number]  # type: ignore[index]
        assert isinstance(verdict, Verdict)
        assert list(verdict.token_ids[:1]) == expected
    assert "non-finite" in caplog.text
    assert len(bench.table) == 2
    assert bench.used_blocks() == sum(
        -(-bench.engine.num_cached_tokens(held) // 4) for held in bench.engine.sequence_ids
    )
    assert len(bench.engine.sequence_ids) == 2


def test_a_round_whose_processing_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def process_or_raise(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
        if rows[0].spec.sampling.top_k == 13:
            raise IndexError("a bug")
        return process(logits, rows)

    monkeypatch.setattr(verifier, "process", process_or_raise)
    bench = Bench()
    good = spec((1, 2), sampling=SamplingParams(temperature=0.7, seed=3))
    bad = spec((1, 2), sampling=SamplingParams(temperature=0.7, seed=3, top_k=13))
    for number, session in ((1, good), (2, bad), (3, good)):
        bench.open(session, number)
        bench.submit(stamp(session.token_ids, 1, number))
    outcomes = {answer.stamp.session_id: answer.outcome for answer in bench.settle()}
    assert str(outcomes[2]) == "INTERNAL: internal error"  # type: ignore[index]
    for number in (1, 3):
        verdict = outcomes[number]  # type: ignore[index]
        assert isinstance(verdict, Verdict)
        assert list(verdict.token_ids) == plain_decode(good, most=1)


def test_an_engines_logits_may_be_inference_tensors() -> None:
    class InferenceEngine(ToyEngine):
        @torch.inference_mode()
        def forward_per_position_logits(
            self, inputs: Sequence[SequenceInput], capture: HiddenCapture | None = None
        ) -> torch.Tensor:
            return super().forward_per_position_logits(inputs, capture)

    session = spec(sampling=SamplingParams(temperature=0.7, frequency_penalty=1.0, seed=3))
    bench = Bench(InferenceEngine(LOGITS, VOCAB))
    bench.open(session)
    assert list(bench.round([1, 2, 3], 1).token_ids) == plain_decode(session, most=1)


def test_a_step_that_raises_leaves_no_sequence_of_its_own_behind() -> None:
    engine = toy()
    plan = StepPlan((), (StepItem(None, 0, [1, 2, 3], 2), StepItem(None, 0, [VOCAB, 1], 1, rank=1)))
    with pytest.raises(StepFailedError) as caught:
        Verifier(engine).step(plan)
    assert "outside" in str(caught.value.__cause__)
    assert not engine.sequence_ids
    assert engine.kv_usage().used_blocks == 0
