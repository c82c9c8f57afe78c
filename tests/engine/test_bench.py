"""The benchmark measures what it says, and its report states method, machine and spread."""

from pathlib import Path

import pytest
import torch

from engine import bench
from engine.bare_forward import BareForward
from engine.bench import Measurement, bench_engine, render_report
from engine.models.linear import PackedLinear
from engine.models.llama import build_llama
from tests.engine.engines import DTYPES, logits_of, random_tokens, tiny_engine
from tests.engine.tiny_models import FAMILIES
from tests.fixtures.tiny_models import random_model


@pytest.mark.parametrize("family", [*FAMILIES])
def test_the_bare_forward_computes_the_engines_logits(family: str) -> None:
    model = random_model(FAMILIES[family])
    bare = BareForward(build_llama(model, torch.float32, PackedLinear, 256), batch_size=2, max_tokens=80)
    tokens = torch.tensor([random_tokens(77, seed=seed) for seed in (1, 2)])
    bare(tokens[:, :72], 0)
    rows = bare(tokens[:, 72:], 72).view(2, 5, -1)
    engine = tiny_engine(model)
    for row, sequence in zip(rows, tokens.tolist(), strict=True):
        torch.testing.assert_close(row, logits_of(engine, sequence)[72:], atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [*DTYPES])
def test_every_shape_is_measured_in_pairs(dtype: str) -> None:
    measurements = bench_engine(random_model(FAMILIES["llama"]), dtype, runs=2, context_len=20)
    assert [(m.batch_size, m.width) for m in measurements] == [(b, w) for b in (1, 8) for w in (1, 2, 4, 5, 8)]
    assert all(len(m.engine_ms) == len(m.bare_ms) == len(m.ratios) == 2 for m in measurements)


def test_an_engine_that_computes_something_else_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="differ by"):
        bench._check_same(torch.ones(2, 4), torch.arange(8.0).view(2, 4))


def test_the_report_states_verdict_spread_and_cost_of_drafts() -> None:
    def shape(width: int, engine_ms: float) -> Measurement:
        return Measurement("float32", 1, width, (engine_ms,) * 3, (10.0, 11.0, 10.0))

    report = render_report([shape(1, 11.0), shape(5, 12.1)], "demo.gguf", runs=3, context_len=256)
    assert (
        "Bound: median ratio at most 1.2 for every shape: **missed**; the largest is 1.21 (float32, batch 1"
        in report
    )
    assert "| float32 | 1 | 1 | 11.00 (11.00–11.00) | 10.00 (10.00–10.50) | 1.10 (1.05–1.10) |" in report
    assert "| float32 | 1 | 1.10 | 1.00 |" in report
    assert "demo.gguf" in report
    assert f"torch {torch.__version__}" in report


def test_the_command_writes_the_report_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "resolve_model", Path)
    monkeypatch.setattr(bench, "load_model", lambda _: random_model(FAMILIES["llama"]))
    out = tmp_path / "report.md"
    bench.main(["--model", "tiny", "--dtype", "float32", "--runs=1", "--threads=1", "--context=20", f"--out={out}"])
    assert out.read_text() == capsys.readouterr().out
    assert out.read_text().startswith("# Engine step against a bare forward")
