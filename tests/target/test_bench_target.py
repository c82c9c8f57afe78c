"""The target benchmark: both sides step the same batch and give the same tokens; the report says how fast each was."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.backends.toy_backend import ToyEngine
from engine.backends.toy_logits import hashed_logits, scripted_logits
from tandem.serving.compute import ComputeThread
from tandem.types import ItemError
from target_service import bench_client
from target_service import bench_target as bench
from target_service.bench_bare import BareSequences
from target_service.bench_client import Segment
from target_service.bench_pairs import Case, Measurement, Pair, measure_all
from target_service.bench_target import render_report
from target_service.limits import Limits
from tests.target.harness import LOGITS, VOCAB, plain_decode, serving, spec, toy


def measured(
    cases: Sequence[Case], bare: ToyEngine, served: ToyEngine, limits: Limits | None = None
) -> list[Measurement]:
    """Two pairs of every case, the service in this process; both engines must be empty at the end."""

    async def main() -> list[Measurement]:
        compute = ComputeThread("bare-engine")
        try:
            async with serving(served, limits) as service:
                measurements = await measure_all(service.channel, bare, compute, cases, runs=2, context_len=6)
                await service.until_idle()
                return measurements
        finally:
            compute.close()

    measurements = asyncio.run(main())
    assert bare.kv_usage().used_blocks == 0
    return measurements


def test_both_sides_step_the_whole_batch_and_give_the_same_tokens() -> None:
    cases = [Case(1, 0), Case(5, 0), Case(3, 2), Case(5, 0, begins_apart=True)]
    measurements = measured(cases, toy(), toy())
    assert [m.case for m in measurements] == cases
    for case, measurement in zip(cases, measurements, strict=True):
        if not case.begins_apart:
            assert [pair.service.rows for pair in measurement.pairs] == [case.num_rows] * 2
        assert len(measurement.ratios) == 2
        assert all(pair.num_tokens >= case.num_sessions for pair in measurement.pairs)


def test_drafts_that_are_right_stand_on_both_sides() -> None:
    repeating = scripted_logits([7], VOCAB)
    (measurement,) = measured([Case(2, 3)], toy(repeating), toy(repeating))
    assert [pair.num_tokens for pair in measurement.pairs] == [2 * 4] * 2


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_bare_side_decodes_greedily_whatever_its_drafts(num_drafts: int) -> None:
    engine, prompts = toy(), [[1, 2, 3], [9], [4, 4]]
    sequences = BareSequences(engine, prompts, num_drafts)
    sequences.run(6)
    for prompt, tokens in zip(prompts, sequences.tokens, strict=True):
        num_tokens = len(tokens) - len(prompt)
        assert num_tokens >= 6
        assert tokens[len(prompt) :] == plain_decode(spec(prompt, max_tokens=num_tokens))
    sequences.release()
    assert engine.kv_usage().used_blocks == 0


def test_a_service_with_other_numerics_is_not_measured() -> None:
    other = ToyEngine(LOGITS, VOCAB, fingerprint="other")
    with pytest.raises(AssertionError, match="computes toy, the service other"):
        measured([Case(1, 0)], toy(), other)


def test_a_service_that_gives_other_tokens_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="3 sessions, 0 drafts: service and bare engine give different tokens"):
        measured([Case(3, 0)], toy(), toy(hashed_logits(VOCAB, seed=6)))


@pytest.mark.parametrize(("max_waiting_sessions", "error"), [(0, "NO_CAPACITY"), (9, "DEADLINE_EXCEEDED")])
def test_a_service_that_takes_fewer_sessions_is_not_measured(
    max_waiting_sessions: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_client, "_OPEN_DEADLINE_MS", 100)
    limits = Limits(max_sessions=2, max_waiting_sessions=max_waiting_sessions)
    with pytest.raises(ItemError, match=error):
        measured([Case(3, 0)], toy(), toy(), limits)


@pytest.mark.parametrize("case", [Case(n, k) for n in (1, 64, 300) for k in (0, 4)], ids=str)
def test_no_session_ends_and_no_draft_is_cut_off_before_the_last_round(case: Case) -> None:
    committed_at_most = 3 * case.num_rounds * (1 + case.num_drafts)
    assert case.max_tokens(3) - committed_at_most >= case.num_drafts + 1
    assert 2 <= case.num_rounds <= 16


def test_the_report_states_the_bound_every_spread_and_where_a_round_goes() -> None:
    def measurement(num_sessions: int, *rounds_s: float) -> Measurement:
        pairs = [Pair(Segment(s, 0.001, 0.02, 0.002, num_sessions), 0.02, num_sessions) for s in rounds_s]
        return Measurement(Case(num_sessions, 0), tuple(pairs))

    measurements = [measurement(1, 0.025, 0.025, 0.024), measurement(4, 0.021)]
    report = render_report(measurements, ["Machine: some.", "Cores: two."], "demo.gguf", runs=3, context_len=128)
    assert "in every case: **missed**; the smallest is 0.800 (1 sessions, 0 drafts)." in report
    assert (
        "| 1 | 0 | at once | 16 | 40.00 (40.00–40.83) | 50.00 (50.00–50.00) | 0.800 (0.800–0.817) | 0.800–0.833 |"
        in report
    )
    assert "| 1 | 0 | at once | 25.00 | 1.00 | 20.00 | 2.00 | 2.00 | 20.00 | 1.0 of 1 |" in report
    assert "Model: demo.gguf. Prompts of 128 tokens, 3 pairs a case" in report
    assert "Machine: some.\nCores: two." in report
    assert "**met**; the smallest is 0.952 (4 sessions" in render_report(measurements[1:], [], "demo.gguf", 1, 8)


def test_the_command_starts_a_service_measures_and_writes_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cores, out = os.sched_getaffinity(0), tmp_path / "report.md"
    cases = ["--sessions=1", "--sessions=3", "--drafts=1"]
    bench.main(["--toy", "hashed:vocab=32", *cases, "--runs=1", "--context=5", f"--out={out}"])
    assert out.read_text() == capsys.readouterr().out
    assert out.read_text().startswith("# The target service against the bare engine")
    assert "Model: toy hashed:vocab=32. Prompts of 5 tokens" in out.read_text()
    assert "| 2.0 of 2 |\n" in out.read_text()
    assert "| 6.0 of 6 |\n" in out.read_text()
    assert out.read_text().count("| 3 | 0 | apart |") == 2
    assert "; 1 threads;" in out.read_text()
    assert os.sched_getaffinity(0) == cores


def test_an_engine_that_cannot_be_loaded_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--toy", "abacus"])
    assert ended.value.code == 2
    assert "toy engine 'abacus' is unknown" in capsys.readouterr().err
