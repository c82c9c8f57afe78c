"""What is said of an orchestrator and its replicas, and the command as a user runs it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tandem.cli import app
from tandem.client_info import ReplicaInfo, ServerInfo
from tandem.credentials import Credentials
from tandem.doctor import command
from tandem.doctor.findings import Finding, Level, ok, problem, warning
from tandem.doctor.service_checks import check_server
from tandem.types import Load, ModelInfo

MODEL = ModelInfo(
    model_id="m", vocab_size=8, vocab_hash="a" * 64, backend="torch", dtype="float32", numerics_fingerprint="f"
)
TARGET = ReplicaInfo("target", "t:1", True, MODEL, Load())
DRAFT = ReplicaInfo("draft", "d:1", True, replace(MODEL, numerics_fingerprint="g"), Load(), "draft_model")
NGRAM = ReplicaInfo("draft", "d:2", True, ModelInfo(), Load(), "ngram")


def found(*replicas: ReplicaInfo) -> list[Finding]:
    return list(check_server(ServerInfo(1, replicas)))


def bad(findings: list[Finding]) -> list[tuple[Level, str]]:
    return [(one.level, one.subject) for one in findings if one.level is not Level.OK]


def test_replicas_that_fit_are_fine_whatever_the_drafts_compute() -> None:
    findings = found(TARGET, replace(TARGET, address="t:2"), DRAFT, NGRAM)
    assert bad(findings) == []
    texts = "\n".join(map(str, findings))
    assert "every target computes m as f" in texts
    assert "one table, hash aaaaaaaaaaaaaaaa, at 3 of 4 replicas" in texts
    assert "OK       draft d:2: ngram on no backend" in texts


def model(**changes: object) -> Callable[[ReplicaInfo], ReplicaInfo]:
    return lambda one: replace(one, model=replace(one.model, **changes))  # type: ignore[arg-type]


def load(**changes: object) -> Callable[[ReplicaInfo], ReplicaInfo]:
    return lambda one: replace(one, load=replace(one.load, **changes))  # type: ignore[arg-type]


def gone(one: ReplicaInfo) -> ReplicaInfo:
    return replace(one, is_connected=False, problem="Connection refused")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (model(numerics_fingerprint="other"), [(Level.PROBLEM, "numerics")]),
        (model(model_id="other"), [(Level.PROBLEM, "numerics")]),
        (model(deterministic=False), [(Level.WARNING, "numerics")]),
        (model(vocab_hash="b" * 64), [(Level.PROBLEM, "vocabulary")]),
        (model(protocol_version=99), [(Level.PROBLEM, "target t:2")]),
        (load(frozen=True), [(Level.PROBLEM, "target t:2")]),
        (load(draining=True), [(Level.WARNING, "target t:2")]),
        (load(total_blocks=100, used_blocks=99, kv_usage=0.99, waiting=3), [(Level.WARNING, "target t:2")]),
        (load(total_blocks=100, used_blocks=99, kv_usage=0.99), []),  # full, and nobody waits
        (gone, [(Level.WARNING, "target t:2")]),
    ],
)
def test_what_is_wrong_with_one_of_two_targets_is_named(
    change: Callable[[ReplicaInfo], ReplicaInfo], expected: list[tuple[Level, str]]
) -> None:
    findings = found(TARGET, change(replace(TARGET, address="t:2")), DRAFT)
    assert bad(findings) == expected
    assert all(one.advice for one in findings if one.level is not Level.OK)


def test_no_target_is_a_problem_and_no_draft_a_warning() -> None:
    assert bad(found(gone(TARGET), DRAFT)) == [(Level.PROBLEM, "target t:1"), (Level.WARNING, "targets")]
    assert bad(found(TARGET)) == [(Level.WARNING, "drafts")]
    assert bad(found(TARGET, gone(DRAFT))) == [(Level.WARNING, "draft d:1"), (Level.WARNING, "drafts")]
    assert bad(found(DRAFT)) == [(Level.PROBLEM, "targets")]


@pytest.mark.parametrize(
    ("machine", "there", "arguments", "code"),
    [
        ([ok("a", "x")], [problem("b", "y", "z")], [], 0),
        ([ok("a", "x")], [problem("b", "y", "z")], ["--address", "h:1"], 1),
        ([warning("a", "x", "w")], [ok("b", "y")], ["--address", "h:1"], 0),
        ([problem("a", "x", "w")], [], [], 1),
    ],
)
def test_the_command_prints_a_line_each_and_ends_with_1_for_a_problem(
    machine: list[Finding],
    there: list[Finding],
    arguments: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "_machine", lambda *_: iter(machine))
    monkeypatch.setattr(command, "_orchestrator", lambda *_: iter(there))
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == code
    assert result.stdout.splitlines() == [str(one) for one in (*machine, *(there if arguments else []))]


def test_an_address_that_nobody_answers_at_is_a_problem_in_one_line() -> None:
    (finding,) = command._orchestrator("127.0.0.1:1", Credentials())
    assert finding.level is Level.PROBLEM
    assert "no Tandem service answers at 127.0.0.1:1" in finding.text
    (finding,) = command._orchestrator("nowhere", Credentials())
    assert "not HOST:PORT" in finding.text


def test_an_unknown_dtype_is_refused_by_name() -> None:
    result = CliRunner().invoke(app, ["doctor", "--dtype", "int3"])
    assert result.exit_code == 2
    assert "float32, bfloat16" in result.stderr
