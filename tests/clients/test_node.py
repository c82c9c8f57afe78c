"""The client in Node.js against real processes: the Python client's tokens, cancels, statuses, a lost orchestrator."""

import asyncio
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem.client import SyncTandemClient
from tandem.processes import ClusterPlan, LocalCluster, ServiceProcess
from tandem.serving.errors import ServiceError
from tests.certificates import Authority
from tests.client.scripted_server import FULL, ScriptedServicer, serving
from tests.e2e.test_command_line import wait_until_idle

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "node"
REQUIRE_VARIABLE = "TANDEM_REQUIRE_NODE"
TOY = "hashed:vocab=512,seed=3,delay_ms=5"
WITHIN_S = 120
TOKEN = "node-0123456789abcdef"
SEED = 2**63 + 5  # more than a JavaScript number can hold
SAMPLED: dict[str, Any] = {"seed": SEED, "temperature": 0.75, "ignore_eos": True}
OPTIONS = ["--seed", str(SEED), "--temperature", "0.75", "--ignore-eos"]


@pytest.fixture(scope="module")
def node() -> str:
    """The program, with the lock file's packages; skips where it is absent, unless `TANDEM_REQUIRE_NODE` is set."""
    program = shutil.which("node")
    if program is None or shutil.which("npm") is None:
        assert not os.environ.get(REQUIRE_VARIABLE), "node and npm are not on the PATH"
        pytest.skip("node and npm, which the client in Node.js needs, are not on the PATH")
    lock, installed = FOLDER / "package-lock.json", FOLDER / "node_modules" / ".package-lock.json"
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # tests may run in several processes
        if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
            install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            subprocess.run(install, check=True, cwd=FOLDER, timeout=WITHIN_S)
    return program


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Toy services, slow enough to be cut off amid an answer."""
    plan = ClusterPlan(["--toy", TOY], ["--proposer", "draft_model", "--toy", TOY], ["--toy-vocab", "512"])
    with LocalCluster(plan, quiet=True) as running:
        yield running


def another_orchestrator(cluster: LocalCluster, *options: str) -> ServiceProcess:
    """Before the same target and draft service."""
    links = ["--target", cluster.addresses["target"], "--draft", cluster.addresses["draft"]]
    local = ["--toy-vocab", "512", "--address", "127.0.0.1:0", "--grace", "0.05"]
    started = cluster.start("orchestrator", [*links, *local, *options])
    cluster.wait_ready(started)
    return started


def run(node: str, address: str, *arguments: str, token: str = "") -> subprocess.CompletedProcess[str]:
    """The client to its end."""
    command = [node, str(FOLDER / "client.mjs"), "hello world", "--address", address, *arguments]
    environment = {**os.environ, "TANDEM_TOKEN": token}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=WITHIN_S, env=environment)


def events(lines: str) -> list[dict[str, Any]]:
    """Of `--json`."""
    return [json.loads(line) for line in lines.splitlines()]


def tokens(events: list[dict[str, Any]], sample_index: int = 0) -> tuple[int, ...]:
    """Of all chunks of an answer."""
    chunks = [event["chunk"] for event in events if event["event"] == "chunk"]
    return tuple(one for chunk in chunks if chunk["sample_index"] == sample_index for one in chunk["token_ids"])


def test_every_answers_tokens_are_those_of_the_python_client_and_come_as_they_are_made(
    node: str, cluster: LocalCluster
) -> None:
    address = cluster.addresses["orchestrator"]
    answer = run(node, address, *OPTIONS, "--max-tokens", "40", "--n", "2", "--json")
    assert answer.returncode == 0, answer.stderr
    started, *others = events(answer.stdout)
    assert started["started"]["seed"] == str(SEED)
    assert len([one for one in others if one["event"] == "chunk"]) > 2 * 2
    assert [one["complete"]["finish_reason"] for one in others if one["event"] == "complete"] == [
        "FINISH_REASON_LENGTH"
    ] * 2
    with SyncTandemClient(address) as client:
        expected = client.complete_many("hello world", n=2, max_tokens=40, **SAMPLED)
    assert [tokens(others, index) for index in range(2)] == [one.token_ids for one in expected]


def test_text_is_on_standard_output_and_figures_on_standard_error(node: str, cluster: LocalCluster) -> None:
    address = cluster.addresses["orchestrator"]
    answer = run(node, address, *OPTIONS, "--max-tokens", "24")
    with SyncTandemClient(address) as client:
        assert answer.stdout == client.complete("hello world", max_tokens=24, **SAMPLED).text
    assert "24 tokens, FINISH_REASON_LENGTH; " in answer.stderr


def test_several_answers_stand_each_under_its_sample_index(node: str, cluster: LocalCluster) -> None:
    address = cluster.addresses["orchestrator"]
    answer = run(node, address, *OPTIONS, "--max-tokens", "24", "--n", "11")
    with SyncTandemClient(address) as client:
        expected = client.complete_many("hello world", n=11, max_tokens=24, **SAMPLED)
    texts = "".join(f"answer {one.sample_index}:\n{one.text}\n" for one in expected)
    assert answer.stdout == re.sub("\r\n?", "\n", texts)  # as `run` reads line ends
    lines = sorted(answer.stderr.splitlines())
    assert len(lines) == 11
    assert lines[0].startswith("answer 0: 24 tokens, FINISH_REASON_LENGTH; ")


def test_help_lists_the_options_and_one_that_there_is_not_is_named(node: str) -> None:
    answer = run(node, "127.0.0.1:1", "--help")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("usage: node client.mjs PROMPT [OPTIONS]\n")
    listed = re.findall(r"^  --([\w-]+) +\w", answer.stdout, re.MULTILINE)
    names = "address seed temperature max-tokens ignore-eos n tries cancel-after json tls-ca help"
    assert listed == names.split()
    unknown = run(node, "127.0.0.1:1", "--colour")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert unknown.stderr.startswith("Unknown option '--colour'")
    assert unknown.stderr.endswith("; --help lists the options\n")


def test_a_cancel_frees_the_sessions_of_both_services(node: str, cluster: LocalCluster) -> None:
    address = cluster.addresses["orchestrator"]
    answer = run(node, address, *OPTIONS, "--max-tokens", "3000", "--cancel-after", "3", "--json")
    assert (answer.returncode, answer.stderr.split(":")[0]) == (1, "CANCELLED")
    assert 0 < len(tokens(events(answer.stdout))) < 3000
    with SyncTandemClient(address) as client:
        assert wait_until_idle(client)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "0"], "INVALID_ARGUMENT: stopping.max_tokens: 0 is less than 1\n"),
        (["--temperature=-1"], "INVALID_ARGUMENT: sampling.temperature: -1.0 is outside [0, 100]\n"),
    ],
)
def test_a_bad_request_is_shown_with_its_status_field_and_limit(
    node: str, cluster: LocalCluster, options: list[str], message: str
) -> None:
    answer = run(node, cluster.addresses["orchestrator"], *options)
    assert (answer.returncode, answer.stdout, answer.stderr) == (1, "", message)


def test_nobody_there_is_unavailable_after_the_last_try(node: str) -> None:
    answer = run(node, "127.0.0.1:1", "--tries", "2")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("UNAVAILABLE: ")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=lambda end: end.name)
def test_an_answer_goes_on_at_the_next_orchestrator_with_the_same_tokens(
    node: str, cluster: LocalCluster, end: signal.Signals
) -> None:
    front, lost = cluster.addresses["orchestrator"], another_orchestrator(cluster)
    command = [node, str(FOLDER / "client.mjs"), "hello world", "--address", f"{lost.address},{front}", "--json"]
    # Without a seed: the client goes on with the one that `started` told it.
    process = subprocess.Popen(
        [*command, "--max-tokens", "400", "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    had = "".join(process.stdout.readline() for _ in range(4))
    lost.process.send_signal(end)
    rest, errors = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, errors
    heard = events(had + rest)
    assert [event["event"] for event in heard if event["event"] != "chunk"] == ["started", "complete"]
    # The figures are those of the last call: fewer rounds than chunks show that there were two.
    assert heard[-1]["complete"]["speculation"]["num_rounds"] < len(heard) - 2
    with SyncTandemClient(front) as client:
        seed = int(heard[0]["started"]["seed"])
        expected = client.complete("hello world", max_tokens=400, ignore_eos=True, seed=seed)
        assert tokens(heard) == expected.token_ids
        assert wait_until_idle(client)


def test_a_call_that_a_stopping_server_drops_goes_on_at_the_next_orchestrator(node: str) -> None:
    async def scenario() -> None:
        dropping = ScriptedServicer([], ServiceError(grpc.StatusCode.CANCELLED, "CANCELLED"))
        async with serving(dropping) as first, serving(ScriptedServicer(FULL)) as second:
            answer = await asyncio.to_thread(run, node, f"{first},{second}", "--json")
        assert (answer.returncode, answer.stderr) == (0, "")
        assert tokens(events(answer.stdout)) == (1, 2, 3, 4)
        assert len(dropping.requests) == 1

    asyncio.run(asyncio.wait_for(scenario(), WITHIN_S))


def test_it_calls_in_tls_with_a_token_and_is_told_what_it_lacks(
    node: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    authority, tokens = Authority(tmp_path), tmp_path / "tokens"
    pair = authority.issue("front")
    tokens.write_text(f"node {TOKEN}\n")
    secured = another_orchestrator(
        cluster, "--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tokens-file", str(tokens)
    )
    address = f"localhost:{secured.address.rpartition(':')[2]}"  # no IP address, of which Node.js has a warning
    reach = (*OPTIONS, "--max-tokens", "8", "--tries", "1")
    answer = run(node, address, *reach, "--tls-ca", str(authority.ca), token=TOKEN)
    with SyncTandemClient(cluster.addresses["orchestrator"]) as client:
        assert answer.stdout == client.complete("hello world", max_tokens=8, **SAMPLED).text, answer.stderr
    refused = run(node, address, *reach, "--tls-ca", str(authority.ca), token=TOKEN + "x")
    assert (refused.returncode, refused.stderr) == (1, "UNAUTHENTICATED: the token is not known here\n")
    others = Authority(tmp_path, "others")
    assert run(node, address, *reach, "--tls-ca", str(others.ca)).stderr.startswith("UNAVAILABLE: ")


def test_it_sends_no_token_in_clear_text_to_another_machine(node: str) -> None:
    answer = run(node, "127.0.0.1:1,10.0.0.1:1", token=TOKEN)
    assert answer.returncode == 1
    assert "the token would travel in clear text to 10.0.0.1:1" in answer.stderr
    assert TOKEN not in answer.stderr
