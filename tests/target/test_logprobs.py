"""Verdicts with log-probabilities: one entry a token, each of its own row, and no cost for who does not ask."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.sampling.logprobs import token_logprobs
from engine.sampling.processors import process
from engine.sampling.rows import Row
from tandem.types import (
    FinishReason,
    LogprobsMode,
    LogprobsOptions,
    SamplingParams,
    SessionSpec,
    TokenLogprobs,
    Verdict,
    VerificationPolicy,
)
from target_service import verifier
from tests.target.harness import LOGITS, VOCAB, Bench, plain_decode, spec, stamp

RAW, PROCESSED = LogprobsMode
GREEDY = SamplingParams(temperature=0.0, seed=1)
PENALISED = SamplingParams(temperature=0.0, seed=1, frequency_penalty=1.5, logit_bias={3: 2.0}, bad_token_ids=(7,))
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, repetition_penalty=1.3, seed=3)


def asking(num_top: int = 2, mode: LogprobsMode = RAW, **fields: Any) -> SessionSpec:
    return spec(logprobs=LogprobsOptions(num_top, mode), **fields)


def expected_entries(session: SessionSpec, before: Sequence[int], token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """Token by token from the logits function, with no engine, no rounds and no drafts."""
    options = session.logprobs
    assert options is not None
    entries, tokens = [], list(before)
    for token_id in token_ids:
        row = torch.from_numpy(LOGITS(tokens))[None]
        if options.mode is PROCESSED:
            row = process(row, [Row(session, tuple(tokens))])
        entries += token_logprobs(row, [token_id], options.num_top)
        tokens.append(token_id)
    return entries


@pytest.mark.parametrize("num_right", [0, 2, 4])
@pytest.mark.parametrize("mode", LogprobsMode)
@pytest.mark.parametrize(
    ("sampling", "policy"),
    [
        (GREEDY, VerificationPolicy.GREEDY),
        (PENALISED, VerificationPolicy.GREEDY),
        (SAMPLED, VerificationPolicy.COUPLED),
        (SAMPLED, VerificationPolicy.REJECTION),
        (SAMPLED, VerificationPolicy.BLOCK),
    ],
)
def test_every_token_has_an_entry_of_its_own_row_whatever_was_drafted(
    sampling: SamplingParams, policy: VerificationPolicy, mode: LogprobsMode, num_right: int
) -> None:
    session = asking(4, mode, sampling=sampling, verification_policy=policy)
    plain = plain_decode(session)
    bench = Bench()
    bench.open(session)
    tokens, verdict = list(session.token_ids), None
    for number in range(1, 5):
        before = list(tokens)
        right = plain[len(tokens) - 3 :][:num_right]
        verdict = bench.round(tokens, number, [*right, *[0] * (4 - num_right)])
        assert list(verdict.logprobs) == expected_entries(session, before, verdict.token_ids)
        for token_id, entry in zip(verdict.token_ids, verdict.logprobs, strict=True):
            assert (token_id in entry.top_token_ids) == (entry.rank <= 4)
            assert entry.logprob < 0.0 or mode is PROCESSED
    if policy in (VerificationPolicy.GREEDY, VerificationPolicy.COUPLED):
        assert tokens[3:] == plain[: len(tokens) - 3]


def test_what_is_cut_off_at_the_end_has_no_entry() -> None:
    free = plain_decode(spec(), most=6)
    ends = [
        (asking(eos_token_ids=frozenset({free[1]})), FinishReason.STOP),
        (asking(max_tokens=2), FinishReason.LENGTH),
    ]
    for session, reason in ends:
        bench = Bench()
        bench.open(session)
        verdict = bench.round([1, 2, 3], 1, free[:4])
        assert (verdict.token_ids, verdict.finish_reason) == (tuple(free[:2]), reason)
        assert list(verdict.logprobs) == expected_entries(session, [1, 2, 3], free[:2])


def test_a_repeated_round_repeats_its_logprobs() -> None:
    bench = Bench()
    bench.open(asking())
    first = bench.round([1, 2, 3], 1, (4, 5))
    assert first.logprobs
    again = bench.submit(stamp([1, 2, 3], 1), (9, 9))
    assert isinstance(again, Verdict)
    assert again.logprobs == first.logprobs


def test_only_who_asks_gets_entries_and_neighbours_decide_as_before() -> None:
    sessions = [
        asking(sampling=SAMPLED, verification_policy=VerificationPolicy.COUPLED),
        spec(),
        spec(sampling=SAMPLED),
        asking(20, PROCESSED),
    ]
    bench = Bench()
    for number, session in enumerate(sessions, 1):
        bench.open(session, number)
        bench.submit(stamp([1, 2, 3], 1, number), (4, 5))
    together = {answer.stamp.session_id: answer.outcome for answer in bench.settle()}
    for number, session in enumerate(sessions, 1):
        alone = Bench()
        alone.open(session)
        verdict = together[number]  # type: ignore[index]
        assert isinstance(verdict, Verdict)
        expected = alone.round([1, 2, 3], 1, (4, 5))
        assert (verdict.token_ids, verdict.logprobs) == (expected.token_ids, expected.logprobs)
        assert len(verdict.logprobs) == (len(verdict.token_ids) if session.logprobs else 0)


def test_who_does_not_ask_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(verifier, "token_logprobs", never)
    monkeypatch.setattr(torch.Tensor, "clone", never)
    bench = Bench()
    for number, session in enumerate((spec(), spec(sampling=SAMPLED)), 1):
        bench.open(session, number)
        bench.settle()
        assert bench.round([1, 2, 3], 1, (4, 5), session=number).token_ids
    assert [call.kind for call in bench.engine.calls if call.kind != "advance"] == ["argmax", "logits"]


def test_a_greedy_round_that_asks_reads_logits_and_gives_the_same_tokens() -> None:
    bench = Bench()
    bench.open(asking())
    tokens = [1, 2, 3]
    bench.round(tokens, 1, plain_decode(spec(), most=4))
    assert bench.engine.calls[-1].kind == "logits"
    assert tokens[3:] == plain_decode(spec(), most=5)


@pytest.mark.parametrize("num_top", [21, 2**32 - 1])
def test_an_open_that_asks_for_more_than_the_limit_is_refused_by_field_and_limit(num_top: int) -> None:
    answer = str(Bench().open(asking(num_top)))
    assert answer == f"INVALID_ARGUMENT: logprobs.num_top: {num_top} is outside [0, 20]"


def test_processed_lists_hold_what_can_be_chosen_and_raw_lists_everything() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=3, seed=5)
    for mode, num_listed in ((PROCESSED, 3), (RAW, 20)):
        bench = Bench()
        bench.open(asking(20, mode, sampling=sampling))
        (entry,) = bench.round([1, 2, 3], 1).logprobs
        assert len(entry.top_token_ids) == len(entry.top_logprobs) == num_listed < VOCAB
        assert entry.rank <= 3
