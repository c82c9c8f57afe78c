"""Every command line of the deployment files is one this build understands, and they fit each other."""

import subprocess
from typing import Any

import pytest

from draft_service.proposers.registry import proposer_names
from draft_service.proposers.trained import bundled_names
from tandem.models import REGISTRY
from tandem.serving.channels import parse_address
from tests.deploy.files import BIN, COMMANDS, COMPOSE, PARSERS, compose_config, deployments, parsed


@pytest.fixture(params=COMMANDS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """By service, of one kind of deployment files."""
    commands = COMMANDS[request.param]()
    return {name: parsed(name, commands[name]) for name in PARSERS}


def test_services_listen_where_others_can_reach_them_and_say_that_it_is_in_clear_text(
    options: dict[str, Any],
) -> None:
    for one in options.values():
        assert one.address.startswith("0.0.0.0:")
        assert one.insecure


def test_every_service_exports_its_figures_on_a_port_of_their_own(options: dict[str, Any]) -> None:
    for one in options.values():
        host, port = parse_address(one.metrics_address)
        assert host == "0.0.0.0"
        assert port not in (0, parse_address(one.address)[1])


def test_the_orchestrator_finds_every_replica_by_the_services_name_and_port(options: dict[str, Any]) -> None:
    for name in ("target", "draft"):
        _, port = parse_address(options[name].address)
        assert getattr(options["orchestrator"], name) == f"dns:{name}:{port}"


def test_the_model_and_the_proposer_exist_and_the_tokenizer_is_the_targets(options: dict[str, Any]) -> None:
    assert options["target"].model in REGISTRY
    assert options["orchestrator"].model == options["draft"].model == options["target"].model
    assert options["draft"].proposer in proposer_names()
    assert options["draft"].head in bundled_names()


def test_the_orchestrator_waits_for_a_target_that_still_loads(options: dict[str, Any]) -> None:
    assert options["orchestrator"].connect_timeout >= 300


def test_the_model_that_is_pulled_is_the_one_that_is_served() -> None:
    compose = compose_config(COMPOSE)["services"]
    pulls = {"compose": [compose["model"]["command"]]}
    pods = [deployments()[name]["spec"]["template"]["spec"] for name in PARSERS]
    pulls["kubernetes"] = [pod["initContainers"][0]["command"] for pod in pods]
    for kind, commands in pulls.items():
        model = parsed("target", COMMANDS[kind]()["target"]).model
        assert all(command == ["tandem", "models", "pull", model] for command in commands)


@pytest.mark.parametrize("service", PARSERS)
def test_the_help_of_a_service_is_printed(service: str) -> None:
    printed = subprocess.run(
        [str(BIN / "tandem"), "serve", service, "--help"], check=True, capture_output=True, text=True
    )
    assert printed.stdout.startswith(f"usage: tandem serve {service} ")
