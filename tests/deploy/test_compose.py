"""The compose files are valid, can be scaled, and stop services no sooner than those stop by themselves."""

import subprocess
from typing import Any

import pytest

from tests.deploy.files import BIN, COMPOSE, COMPOSE_GPU, COMPOSE_TLS, PARSERS, compose_config, parsed


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(compose_config(COMPOSE)["services"])


@pytest.mark.parametrize("path", [COMPOSE, COMPOSE_GPU, COMPOSE_TLS], ids=lambda path: path.name)
def test_a_compose_file_meets_the_compose_specification(path: Any) -> None:
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path)]
    subprocess.run(command, check=True, capture_output=True)


def test_the_three_services_have_health_checks_of_their_own_address(services: dict[str, Any]) -> None:
    for name in PARSERS:
        port = parsed(name, services[name]["command"]).address.rpartition(":")[2]
        check = ["CMD", "tandem", "health", "--address", f"127.0.0.1:{port}"]
        assert services[name]["healthcheck"]["test"] == check


def test_only_the_orchestrator_is_published_and_on_loopback_alone(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if service.get("ports")}
    assert published.keys() == {"orchestrator"}
    (port,) = published["orchestrator"]
    assert port["host_ip"] == "127.0.0.1"
    assert f"0.0.0.0:{port['target']}" == parsed("orchestrator", services["orchestrator"]["command"]).address


def test_scaled_services_have_neither_a_port_nor_a_name_that_there_can_be_only_one_of(
    services: dict[str, Any],
) -> None:
    for name in ("target", "draft"):
        assert "ports" not in services[name]
        assert "container_name" not in services[name]
        assert "hostname" not in services[name]


def test_compose_waits_for_longer_than_a_service_takes_to_stop(services: dict[str, Any]) -> None:
    for name in PARSERS:
        grace_s = parsed(name, services[name]["command"]).grace
        waits_s = float(services[name]["stop_grace_period"].removesuffix("s"))
        assert waits_s > (grace_s if name == "orchestrator" else 2 * grace_s)
        assert services[name]["init"] is True
        assert services[name]["restart"] == "unless-stopped"


def test_the_key_value_memory_fits_into_the_memory_that_the_target_may_take(services: dict[str, Any]) -> None:
    limits = {name: int(services[name]["deploy"]["resources"]["limits"]["memory"]) for name in PARSERS}
    assert 4 * parsed("target", services["target"]["command"]).kv_memory <= limits["target"]
    assert sum(limits.values()) <= 5 * 2**30  # of a laptop


def test_the_override_for_gpus_changes_nothing_but_the_reservations_of_the_model_services() -> None:
    plain, merged = compose_config(COMPOSE), compose_config(COMPOSE, COMPOSE_GPU)
    for name in ("target", "draft"):
        reservations = merged["services"][name]["deploy"]["resources"].pop("reservations")
        (device,) = reservations.pop("devices")
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        assert reservations == {}
    merged.pop("x-gpu")
    assert merged == plain
