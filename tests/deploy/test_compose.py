"""docker-compose.yml is valid, and every command in it is one this build understands."""

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draft_service.__main__ import build_parser as draft_parser
from draft_service.proposers.registry import proposer_names
from orchestrator.__main__ import build_parser as orchestrator_parser
from tandem.models import REGISTRY
from target_service.__main__ import build_parser as target_parser

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


@pytest.mark.parametrize(
    ("service", "build_parser"),
    [("target", target_parser), ("draft", draft_parser), ("orchestrator", orchestrator_parser)],
)
def test_the_command_of_each_service_parses(service: str, build_parser: Callable[[], ArgumentParser]) -> None:
    command = compose_config()["services"][service]["command"]
    assert command[:3] == ["tandem", "serve", service]
    options = build_parser().parse_args(command[3:])
    assert options.address.startswith("0.0.0.0:")
    assert options.insecure


def test_the_proposer_and_the_model_of_the_compose_file_exist() -> None:
    services = compose_config()["services"]
    assert draft_parser().parse_args(services["draft"]["command"][3:]).proposer in proposer_names()
    assert services["model"]["command"][3] in REGISTRY
    for name, build_parser in (("target", target_parser), ("orchestrator", orchestrator_parser)):
        assert build_parser().parse_args(services[name]["command"][3:]).model in REGISTRY
