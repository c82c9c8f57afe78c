"""Churn against toy services in processes of their own: it passes where all is well, and only there."""

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.churn.__main__ import main
from loadtest.churn.calls import Fate, Plan
from loadtest.churn.judge import MAX_PROBLEMS, verdict
from loadtest.churn.load import LoadSettings, run_load
from loadtest.churn.requests import make_requests, spec_bench_prompts
from loadtest.recorded import Recorded, record
from tandem.client import SyncTandemClient
from tandem.cluster_options import ClusterChoice
from tandem.processes import LocalCluster

TOY = "hashed:vocab=512,seed=3,blocks=300"
DRAFT = f"{TOY},blend=0.2"
SETTINGS = LoadSettings(num_clients=16, max_calls=40)
HELD_TOKENS = 3900  # one a step, so the session outlasts any 15 calls of at most 256 tokens
SEED = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    plan = ClusterChoice("", "float32", DRAFT, False, 4, None, TOY).plan()
    with LocalCluster(plan, quiet=True) as running:
        yield running


@pytest.fixture(scope="module")
def address(cluster: LocalCluster) -> str:
    return cluster.addresses["orchestrator"]


@pytest.fixture(scope="module")
def recorded(address: str) -> list[Recorded]:
    with SyncTandemClient(address) as client:
        return record(client, make_requests(spec_bench_prompts(), 6, SEED))


def always_finish(rng: random.Random) -> Fate:
    return Fate(Plan.FINISH)


def test_requests_repeat_with_their_seed_and_differ_in_everything() -> None:
    requests = make_requests(spec_bench_prompts(), 32, SEED)
    assert requests == make_requests(spec_bench_prompts(), 32, SEED)
    assert requests != make_requests(spec_bench_prompts(), 32, SEED + 1)
    lengths = [len(prompt) for prompt, _ in requests]
    assert min(lengths) < 40
    assert max(lengths) > 1000
    assert [options["temperature"] == 0.0 for _, options in requests] == [True, False] * 16
    assert len({options.get("seed") for _, options in requests}) == 17
    for name in ("stop", "min_tokens", "num_draft_tokens", "ignore_eos"):
        assert 0 < sum(name in options for _, options in requests) < 32


def test_sixty_four_clients_pass_on_toy_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "churn.md"
    arguments = ["--toy", TOY, "--draft-model", DRAFT, "--block-size", "16", "--max-calls", "160"]
    code = main([*arguments, "--requests", "12", "--out", str(page)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "160 calls in " in printed
    assert "- requests running: 64\n" in printed
    assert "In use afterwards: nothing." in printed
    assert page.read_text() == printed


def test_one_wrong_token_in_what_was_recorded_is_found(address: str, recorded: list[Recorded]) -> None:
    first = recorded[0]
    wrong = replace(first, token_ids=(*first.token_ids[:-1], first.token_ids[-1] + 1))
    outcome = run_load(address, [wrong, *recorded[1:]], replace(SETTINGS, draw_fate=always_finish))
    assert 0 < len(outcome.tally.problems) <= MAX_PROBLEMS + SETTINGS.num_clients
    for problem in outcome.tally.problems:
        assert repr(first.prompt[:40]) in problem
    assert set(outcome.tally.problems) <= set(verdict(outcome))


def test_a_run_in_which_everything_finished_does_not_pass(address: str, recorded: list[Recorded]) -> None:
    outcome = run_load(address, recorded, replace(SETTINGS, draw_fate=always_finish))
    assert outcome.tally.problems == []
    assert {
        "nothing is shown: it never happened that a request was cancelled",
        "nothing is shown: it never happened that a request's deadline passed",
    } <= set(verdict(outcome))


def test_a_session_that_stays_open_is_found(address: str, recorded: list[Recorded]) -> None:
    with SyncTandemClient(address) as client:
        held = iter(client.generate("held", max_tokens=HELD_TOKENS, ignore_eos=True, speculation=False))
        next(held)
        outcome = run_load(address, recorded, replace(SETTINGS, max_calls=15, idle_within_s=0.2))
        held.close()
    assert outcome.tally.problems == []
    assert any(line.startswith("still in use: target at ") and ": 1 sessions" in line for line in verdict(outcome))
    assert any(line.startswith("still in use: orchestrator: 1 ") for line in verdict(outcome))


def test_requests_that_hang_are_named(cluster: LocalCluster, address: str, recorded: list[Recorded]) -> None:
    sampled = recorded[1]
    target = cluster.services[0]
    assert target.service == "target"
    os.kill(target.process.pid, signal.SIGSTOP)
    try:
        settings = replace(SETTINGS, num_clients=2, stall_s=0.5, idle_within_s=0.0, draw_fate=always_finish)
        outcome = run_load(address, [sampled], settings)
    finally:
        os.kill(target.process.pid, signal.SIGCONT)
    assert outcome.tally.num_calls == 0
    assert len(outcome.hanging) == 2
    for call in outcome.hanging:
        assert "finish, 0 chunks came" in call
        assert str(sampled.options["seed"]) in call
        assert f"did not end: {call}" in verdict(outcome)
    again = run_load(address, recorded, replace(SETTINGS, max_calls=8, draw_fate=always_finish))
    assert again.tally.problems == []
    assert again.in_use == ()
