"""docker-compose.yml is valid, and every command in it is one this build understands."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
COMPOSE_FILE = ROOT / "docker-compose.yml"


def compose_config() -> dict[str, Any]:
    """The file as compose itself resolves it; no daemon is needed."""
    command = [str(BIN / "docker-compose"), "-f", str(COMPOSE_FILE), "config", "--format", "json"]
    printed = subprocess.run(command, check=True, capture_output=True, env={"PATH": "/usr/bin", "HOME": "/tmp"})
    return dict(json.loads(printed.stdout))


def test_the_compose_file_meets_the_compose_specification() -> None:
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(COMPOSE_FILE)]
    subprocess.run(command, check=True, capture_output=True)


def test_the_three_services_are_there_with_health_and_only_loopback_is_published() -> None:
    config = compose_config()
    for name in ("target", "draft", "orchestrator"):
        assert config["services"][name]["healthcheck"]["test"][:3] == ["CMD", "tandem", "health"]
    published = [port for service in config["services"].values() for port in service.get("ports", [])]
    assert [port["host_ip"] for port in published] == ["127.0.0.1"]


@pytest.mark.parametrize("service", ["target", "draft", "orchestrator"])
def test_the_command_of_each_service_parses(service: str) -> None:
    command = compose_config()["services"][service]["command"]
    assert command[:3] == ["tandem", "serve", service]
    arguments = [sys.executable, "-m", "tandem", *command[1:], "--help"]
    answer = subprocess.run(arguments, check=True, capture_output=True, text=True, cwd=ROOT)
    options = [word for word in command[3:] if word.startswith("--")]
    assert options
    for option in options:
        assert option in answer.stdout, f"{service} does not know {option}"
