"""The deployment files as the tools that run them read them, and the command lines in them."""

import json
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from draft_service.__main__ import build_parser as draft_parser
from orchestrator.__main__ import build_parser as orchestrator_parser
from target_service.__main__ import build_parser as target_parser

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
COMPOSE = ROOT / "docker-compose.yml"
COMPOSE_GPU, COMPOSE_TLS = ROOT / "docker-compose.gpu.yml", ROOT / "docker-compose.tls.yml"
KUBERNETES = ROOT / "deploy" / "kubernetes"
MANIFESTS, KEDA = sorted(KUBERNETES.glob("*.yaml")), sorted((KUBERNETES / "keda").glob("*.yaml"))
MONITORING, TLS_PATCHES = sorted((KUBERNETES / "monitoring").glob("*.yaml")), KUBERNETES / "tls"

PARSERS: dict[str, Callable[[], ArgumentParser]] = {
    "target": target_parser,
    "draft": draft_parser,
    "orchestrator": orchestrator_parser,
}


def compose_config(*files: Path) -> dict[str, Any]:
    """The files, merged, as compose itself resolves them; no daemon is needed."""
    named = [word for path in files for word in ("-f", str(path))]
    command = [str(BIN / "docker-compose"), *named, "config", "--format", "json"]
    printed = subprocess.run(command, check=True, capture_output=True, env={"PATH": "/usr/bin", "HOME": "/tmp"})
    return dict(json.loads(printed.stdout))


def objects(*paths: Path) -> list[dict[str, Any]]:
    """Every Kubernetes object of these files."""
    return [one for path in paths for one in yaml.safe_load_all(path.read_text())]


def deployments() -> dict[str, dict[str, Any]]:
    """By name."""
    return {one["metadata"]["name"]: one for one in objects(*MANIFESTS) if one["kind"] == "Deployment"}


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    """The one that serves."""
    (one,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(one)


def compose_commands() -> dict[str, list[str]]:
    """The command lines of the three services in docker-compose.yml."""
    services = compose_config(COMPOSE)["services"]
    return {name: services[name]["command"] for name in PARSERS}


def kubernetes_commands() -> dict[str, list[str]]:
    """The command lines of the three services in the manifests."""
    return {name: container(deployment)["command"] for name, deployment in deployments().items()}


COMMANDS: dict[str, Callable[[], dict[str, list[str]]]] = {
    "compose": compose_commands,
    "kubernetes": kubernetes_commands,
}


def parsed(service: str, command: list[str]) -> Namespace:
    """The options of a `tandem serve` command line."""
    assert command[:3] == ["tandem", "serve", service]
    return PARSERS[service]().parse_args(command[3:])
