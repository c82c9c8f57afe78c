"""What a machine gives, from files that say it; and whether that is enough."""

import asyncio
import json
import socket
import struct
import sys
from pathlib import Path

import pytest

from tandem.credentials import Credentials
from tandem.doctor.command import why_not_serving
from tandem.doctor.findings import Finding, Level, exit_code, ok, problem, warning
from tandem.doctor.machine import Machine, read_machine
from tandem.doctor.machine_checks import (
    check_instructions,
    check_memory,
    check_models,
    check_ports,
    check_threads,
    is_port_free,
)
from tandem.doctor.model_size import ModelSizeError, num_weights
from tandem.doctor.packages import check_packages, check_python
from tandem.doctor.torch_facts import TorchFacts, TorchProbeError, ask_torch
from tandem.serving.server_tls import ServerTls
from tests.certificates import Authority
from tests.client.scripted_server import FULL, ScriptedServicer, serving

GIB = 1 << 30


def torch(threads: int = 4, kv_memory_bytes: int = GIB) -> TorchFacts:
    return TorchFacts("2.13.0", threads, "AVX512", kv_memory_bytes)


def write(root: Path, **files: str) -> Path:
    """Files by path, "/" written as "__"."""
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_limits_has_what_the_kernel_says(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__meminfo="MemTotal: 99 kB\nMemAvailable:    2048 kB\n",
        proc__cpuinfo="processor : 0\nflags\t\t: fpu avx2 avx512f\n",
        proc__self__cgroup="0::/\n",
    )
    machine = read_machine(tmp_path, num_cpus=8)
    assert machine == Machine(8, None, 2048 * 1024, frozenset({"fpu", "avx2", "avx512f"}))


def test_the_narrowest_limit_of_nested_control_groups_counts_and_cached_files_give_way(tmp_path: Path) -> None:
    group = "sys__fs__cgroup__outer"
    files = {
        "proc__self__cgroup": "0::/outer/inner\n",
        "proc__meminfo": "MemAvailable: 99999999 kB\n",
        f"{group}__cpu_dot_max": "150000 100000\n",
        f"{group}__memory_dot_max": "max\n",
        f"{group}__inner__cpu_dot_max": "max 100000\n",
        f"{group}__inner__memory_dot_max": "1000\n",
        f"{group}__inner__memory_dot_current": "900\n",
        f"{group}__inner__memory_dot_stat": "anon 500\ninactive_file 300\n",
    }
    machine = read_machine(write(tmp_path, **files), num_cpus=8)
    assert (machine.cpu_quota, machine.available_bytes) == (1.5, 400)


def test_control_groups_of_version_1_are_read_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        proc__self__cgroup="4:cpu,cpuacct:/box\n3:memory:/box\n",
        sys__fs__cgroup__cpu__box__cpu_dot_cfs_quota_us="200000\n",
        sys__fs__cgroup__cpu__box__cpu_dot_cfs_period_us="100000\n",
        sys__fs__cgroup__cpu__cpu_dot_cfs_quota_us="-1\n",
        sys__fs__cgroup__cpu__cpu_dot_cfs_period_us="100000\n",
        sys__fs__cgroup__memory__box__memory_dot_limit_in_bytes="5000\n",
        sys__fs__cgroup__memory__box__memory_dot_usage_in_bytes="1000\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes=f"{1 << 62}\n",
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes="1000\n",
    )
    machine = read_machine(tmp_path, num_cpus=8)
    assert (machine.cpu_quota, machine.available_bytes) == (2.0, 4000)


def test_what_cannot_be_found_out_is_unknown(tmp_path: Path) -> None:
    assert read_machine(tmp_path, num_cpus=2) == Machine(2)
    assert read_machine().num_cpus >= 1


@pytest.mark.parametrize(
    ("machine", "threads", "level"),
    [
        (Machine(4), 4, Level.OK),
        (Machine(8, cpu_quota=2.0), 8, Level.WARNING),  # a quota that nobody told torch of
        (Machine(8, cpu_quota=1.5), 2, Level.OK),
        (Machine(8), 1, Level.WARNING),
        (Machine(8, cpu_quota=0.5), 1, Level.OK),
    ],
)
def test_threads_are_held_against_the_quota(machine: Machine, threads: int, level: Level) -> None:
    assert check_threads(machine, torch(threads)).level is level


@pytest.mark.parametrize(
    ("flags", "dtype", "level"),
    [
        ({"avx2", "avx512f", "avx512_bf16"}, "bfloat16", Level.OK),
        ({"avx2", "avx512f"}, "float32", Level.OK),
        ({"avx2", "avx512f"}, "bfloat16", Level.WARNING),
        ({"sse2"}, "float32", Level.WARNING),
        (set[str](), "bfloat16", Level.OK),  # nobody knows
    ],
)
def test_instructions_are_held_against_the_dtype(flags: set[str], dtype: str, level: Level) -> None:
    assert check_instructions(Machine(1, cpu_flags=frozenset(flags)), torch(), dtype).level is level


def safetensors(path: Path, **shapes: list[int]) -> None:
    entries = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps({"__metadata__": {}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Of 250,000,000 weights, says its header."""
    (tmp_path / "config.json").write_text("{}")
    safetensors(tmp_path / "one.safetensors", a=[10_000, 20_000], b=[1])
    safetensors(tmp_path / "two.safetensors", c=[49_999_999])
    return tmp_path


def test_weights_are_counted_in_the_headers(model: Path, tmp_path: Path) -> None:
    assert num_weights(model) == 250_000_000
    (model / "three.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(ModelSizeError, match=r"three\.safetensors: not a usable safetensors file"):
        num_weights(model)
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ModelSizeError, match="holds neither"):
        num_weights(empty)


@pytest.mark.parametrize(
    ("dtype", "available", "level"),
    [
        ("float32", 10**9 + GIB, Level.OK),
        ("float32", 10**9 + GIB - 1, Level.PROBLEM),
        ("bfloat16", 10**9, Level.PROBLEM),
        ("bfloat16", 10**9 + GIB - 1, Level.OK),
        ("float32", None, Level.OK),
    ],
)
def test_memory_is_held_against_weights_and_rows(
    dtype: str, available: int | None, level: Level, model: Path
) -> None:
    finding = check_memory(Machine(1, available_bytes=available), torch(), str(model), dtype)
    assert finding.level is level
    assert "1.0 GiB of key-value memory" in finding.text


def test_a_model_whose_needs_are_not_known_is_no_problem_of_memory() -> None:
    finding = check_memory(Machine(1, available_bytes=1), torch(), "/no/such", "float32")
    assert finding.level is Level.WARNING


def test_a_model_that_can_be_pulled_is_a_warning_and_a_disk_that_cannot_hold_it_a_problem(tmp_path: Path) -> None:
    missing, directory = check_models("smollm2-135m", tmp_path / "models")
    assert (missing.level, missing.advice) == (Level.WARNING, "tandem models pull smollm2-135m")
    assert directory.level is Level.OK
    (tmp_path / "file").write_text("")
    _, directory = check_models("smollm2-135m", tmp_path / "file" / "models")
    assert directory.level is Level.PROBLEM
    assert "TANDEM_MODELS_DIR" in directory.advice
    (unknown,) = check_models("/no/such", tmp_path)
    assert unknown.level is Level.PROBLEM


def test_a_model_that_is_there_is_fine(model: Path) -> None:
    (finding,) = check_models(str(model), model)
    assert finding == ok("model", f"{model} is at {model}")


def test_a_taken_port_is_fine_when_a_service_is_healthy_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not is_port_free(port)
        asked: list[str] = []
        for why_not, level in (("", Level.OK), ("it says NOT_SERVING", Level.WARNING)):
            finding = check_ports(port, lambda address, answer=why_not: asked.append(address) or answer)[0]  # type: ignore[func-returns-value, misc]
            assert finding.level is level
            assert why_not in finding.text
        assert asked[0] == f"127.0.0.1:{port}"
    assert is_port_free(port)


def test_a_port_with_tls_is_asked_with_tls_and_not_said_to_be_somebody_elses(tmp_path: Path) -> None:
    inside, edge = Authority(tmp_path, "inside"), Authority(tmp_path, "edge")
    pair = inside.issue("target")

    async def finding(shown: Credentials) -> Finding:
        tls = ServerTls(pair.cert, pair.key, inside.ca)
        async with serving(ScriptedServicer(FULL), tls) as address:
            port = int(address.rpartition(":")[2])
            return (await asyncio.to_thread(check_ports, port, lambda one: why_not_serving(one, shown)))[0]

    for shown, why in (
        (Credentials(), "as a service with TLS does; --tls-ca asks for that"),
        (Credentials(edge.ca), "certificate is not signed by an authority of --tls-ca"),
        (Credentials(inside.ca), "it may want a client certificate, --tls-client-cert"),
    ):
        found = asyncio.run(asyncio.wait_for(finding(shown), 60))
        assert found.level is Level.WARNING
        assert why in found.text
        assert "runs here with TLS, give the --tls- options that it is called by" in found.advice


def test_packages_are_held_against_what_this_build_says_it_needs() -> None:
    requirements = [
        "grpcio<2,>=1.81.1",
        "numpy<3,>=2.0",
        "jinja2<4,>=3.1",
        'torch<3,>=2.9; extra == "engine"',
        'gguf<1,>=0.17; extra == "engine"',
        'locust<3,>=2.40; extra == "load"',
        'triton<4,>=3.4; sys_platform == "linux" and extra == "triton"',
    ]
    versions = {"grpcio": "1.81.1", "numpy": "3.0", "torch": "2.13.0+cpu"}
    found = {finding.subject: finding for finding in check_packages(requirements, versions.get)}
    assert {name: finding.level for name, finding in found.items()} == {
        "grpcio": Level.OK,
        "numpy": Level.PROBLEM,
        "jinja2": Level.PROBLEM,
        "torch": Level.OK,
        "gguf": Level.WARNING,
    }
    assert found["numpy"].text == "3.0 is outside <3,>=2.0"


@pytest.mark.parametrize(
    ("version", "level"),
    [("1.81", Level.PROBLEM), ("1.81.1", Level.OK), ("1.100", Level.OK), ("2.0.0", Level.PROBLEM)],
)
def test_versions_are_compared_as_numbers(version: str, level: Level) -> None:
    (finding,) = check_packages(["grpcio<2,>=1.81.1"], lambda _: version)
    assert finding.level is level


def test_this_builds_own_needs_are_met_here() -> None:
    findings = list(check_packages())
    assert len(findings) >= 7
    assert exit_code(findings) == 0


def test_an_old_python_is_a_problem() -> None:
    assert check_python((3, 10, 9)).level is Level.PROBLEM
    assert check_python((3, 11, 0)).level is Level.OK


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    facts = {"version": "2", "threads": 3, "cpu_capability": "AVX2", "kv_memory_bytes": 5}
    say = f"print({json.dumps(facts)!r})"
    assert ask_torch((sys.executable, "-c", say)) == TorchFacts("2", 3, "AVX2", 5)
    with pytest.raises(TorchProbeError, match="ImportError: no"):
        ask_torch((sys.executable, "-c", "raise ImportError('no')"))


def test_what_the_engine_says_of_torch_can_be_read() -> None:
    facts = ask_torch()
    assert facts.threads >= 1
    assert facts.kv_memory_bytes > 0


def test_a_line_has_level_subject_and_advice_and_only_a_problem_makes_the_code_1() -> None:
    findings: list[Finding] = [ok("a", "fine"), warning("b", "slow", "wait")]
    assert [str(one) for one in findings] == ["OK       a: fine", "WARNING  b: slow; wait"]
    assert exit_code(findings) == 0
    assert exit_code([*findings, problem("c", "broken", "mend it")]) == 1
