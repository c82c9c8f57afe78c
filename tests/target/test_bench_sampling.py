"""The sampling benchmark times what the verifier does, every draft standing, and states method, machine and spread."""

from pathlib import Path

import pytest
import torch

from engine.models.config import LoadedModel
from engine.sampling.policies import VerifyRows
from tandem.types import Proposal, VerificationPolicy
from target_service import bench_sampling as bench
from target_service.bench_sampling import Measurement, Section, Workload, decision_ms, render_report
from target_service.sampling_workload import FILTERS, NUM_DRAFTS, Case, accepted_requests, all_cases
from tests.engine.tiny_models import FAMILIES
from tests.fixtures.tiny_models import random_model

COUPLED, GREEDY = VerificationPolicy.COUPLED, VerificationPolicy.GREEDY


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WIDE_VOCAB_SIZE", 1500)


def tiny_model() -> LoadedModel:
    return random_model(FAMILIES["llama"])


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: f"{case.policy.value}, {case.filters}")
def test_every_draft_of_every_case_stands(case: Case) -> None:
    logits = 3 * torch.randn((10, 900), generator=torch.Generator().manual_seed(2))
    raw = logits.clone()
    requests = accepted_requests(case, logits, [[1, 2, 3, 4], [5, 6]])
    decision_ms(logits, requests)
    assert [request.num_rows for request in requests] == [NUM_DRAFTS + 1] * 2
    assert all(request.spec.effective_policy is case.policy for request in requests)
    assert torch.equal(logits, raw), "the next run finds the same rows"


def test_a_rejected_draft_is_not_timed() -> None:
    logits = torch.zeros(5, 30)
    logits[:, 3] = 9.0
    rejected = VerifyRows(Case(GREEDY, "none").spec([1, 2], 0), [1, 2], Proposal((3, 3, 4, 3)))
    with pytest.raises(AssertionError, match="2 of 4 drafts stand"):
        decision_ms(logits, [rejected])


def test_pairs_of_forward_and_sampling_are_measured() -> None:
    measurement = Workload(tiny_model(), context_len=12).measure(Case(COUPLED, "top_p 0.9"), runs=2)
    assert len(measurement.forward_ms) == len(measurement.sampling_ms) == len(measurement.wide_ms) == 2
    assert len(measurement.ratios) == 2


def test_the_report_states_the_bound_on_the_most_threads_and_every_spread() -> None:
    def section(num_threads: int, sampling_ms: float) -> Section:
        cases = [Case(COUPLED, "none"), Case(GREEDY, "penalties")]
        times = (50.0, 50.0, 100.0), (sampling_ms,) * 3, (9.0, 10.0, 12.0)
        return Section(
            num_threads, [f"{num_threads} threads of a machine"], [Measurement(c, *times) for c in cases]
        )

    report = render_report([section(1, 2.0), section(2, 5.0)], "demo.gguf", runs=3, context_len=256)
    assert "at most 8% of the forward: **missed**; it is 10.0% on 2 threads." in report
    assert "| coupled | none | 2.00 (2.00–2.00) | 4.0% | 10.00 (9.50–11.00) |" in report
    assert "Forward: 50.00 (50.00–87.50) ms." in report
    assert "2 threads of a machine" in report
    assert "demo.gguf" in report


def test_the_command_measures_each_number_of_threads_and_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "resolve_model", Path)
    monkeypatch.setattr(bench, "load_model", lambda _: tiny_model())
    monkeypatch.setattr(bench, "all_cases", lambda: [Case(COUPLED, filters) for filters in FILTERS])
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    out = tmp_path / "report.md"
    bench.main(["--model", "tiny", "--runs=1", "--threads=3", "--threads=1", "--context=6", f"--out={out}"])
    assert used[-2:] == [3, 1], "after the self-test of the engine"
    assert out.read_text() == capsys.readouterr().out
    assert out.read_text().startswith("# Cost of sampling")
    assert out.read_text().count("| coupled |") == 2 * len(FILTERS)
