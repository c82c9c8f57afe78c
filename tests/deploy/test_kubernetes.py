"""The manifests are valid, their parts belong together, and they end pods no sooner than services end."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

import draft_service.server
import orchestrator.server
import target_service.server
from tandem.serving.channels import parse_address
from tests.deploy.files import BIN, KEDA, MANIFESTS, MONITORING, PARSERS, container, deployments, objects, parsed

SERVICE_NAMES = {
    "target": target_service.server.SERVICE_NAME,
    "draft": draft_service.server.SERVICE_NAME,
    "orchestrator": orchestrator.server.SERVICE_NAME,
}
NAMES = list(PARSERS)
PROMETHEUS_NAMESPACE = "monitoring"


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    """By name."""
    return {one["metadata"]["name"]: one for one in objects(*MANIFESTS) if one["kind"] == kind}


def pod(name: str) -> dict[str, Any]:
    return dict(deployments()[name]["spec"]["template"]["spec"])


def labels(name: str) -> dict[str, str]:
    """Of the pods."""
    return dict(deployments()[name]["spec"]["template"]["metadata"]["labels"])


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_valid_and_has_no_unknown_field(path: Path) -> None:
    command = [str(BIN / "kubernetes-validate"), "--strict", str(path)]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_validator_finds_a_field_that_does_not_exist(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(MANIFESTS[-1].read_text().replace("minReadySeconds", "minReadyMinutes"))
    assert subprocess.run([str(BIN / "kubernetes-validate"), "--strict", str(wrong)], check=False).returncode != 0


def test_everything_is_in_the_namespace_and_the_namespace_is_made_first() -> None:
    first, *others = objects(*MANIFESTS)
    assert first["kind"] == "Namespace"
    assert {one["metadata"]["namespace"] for one in others} == {first["metadata"]["name"]}


def test_there_is_one_deployment_a_service_and_what_belongs_to_it_selects_its_pods() -> None:
    assert sorted(deployments()) == sorted(NAMES)
    for name in NAMES:
        assert deployments()[name]["spec"]["selector"]["matchLabels"] == labels(name)
        assert of_kind("Service")[name]["spec"]["selector"] == labels(name)
        assert of_kind("PodDisruptionBudget")[name]["spec"]["selector"]["matchLabels"] == labels(name)
        (spread,) = pod(name)["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == labels(name)


def test_draft_and_target_are_headless_so_that_their_name_has_every_replicas_address() -> None:
    services = of_kind("Service")
    assert [services[name]["spec"].get("clusterIP") for name in NAMES] == ["None", "None", None]
    assert services["orchestrator"]["spec"]["type"] == "ClusterIP"


@pytest.mark.parametrize("name", NAMES)
def test_ports_and_probes_are_those_of_the_command(name: str) -> None:
    served = container(deployments()[name])
    _, port = parse_address(parsed(name, served["command"]).address)
    _, metrics_port = parse_address(parsed(name, served["command"]).metrics_address)
    ports = {one["name"]: one["containerPort"] for one in served["ports"]}
    assert ports == {"grpc": port, "metrics": metrics_port}
    assert [one["port"] for one in of_kind("Service")[name]["spec"]["ports"]] == [port]
    assert served["readinessProbe"]["grpc"] == {"port": port, "service": SERVICE_NAMES[name]}
    assert served["livenessProbe"]["grpc"] == {"port": port, "service": ""}
    assert served["startupProbe"]["grpc"] == {"port": port}


@pytest.mark.parametrize("name", NAMES)
def test_a_pod_has_longer_to_end_than_its_service_takes(name: str) -> None:
    served = container(deployments()[name])
    grace_s = parsed(name, served["command"]).grace
    before_s = float(served["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in served else 0
    takes_s = before_s + (grace_s if name == "orchestrator" else 2 * grace_s)
    assert pod(name)["terminationGracePeriodSeconds"] > takes_s


def test_a_pod_has_time_to_start_for_as_long_as_the_orchestrator_waits_for_targets() -> None:
    for name in NAMES:
        probe = container(deployments()[name])["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 600
    waits_s = parsed("orchestrator", container(deployments()["orchestrator"])["command"]).connect_timeout
    assert waits_s < 600


@pytest.mark.parametrize("name", NAMES)
def test_pods_run_without_root_without_privileges_and_on_a_read_only_file_system(name: str) -> None:
    spec = pod(name)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    for one in [*spec["containers"], *spec.get("initContainers", [])]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert one["resources"]["requests"].keys() == {"cpu", "memory"}
        assert one["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_model_service_computes_with_as_many_threads_as_it_has_cpus(name: str) -> None:
    served = container(deployments()[name])
    assert int(served["resources"]["requests"]["cpu"]) == parsed(name, served["command"]).threads


def test_only_orchestrators_may_call_the_model_services_and_only_prometheus_their_figures() -> None:
    for name in ("target", "draft"):
        policy = of_kind("NetworkPolicy")[name]["spec"]
        assert policy["podSelector"]["matchLabels"] == labels(name)
        options = parsed(name, container(deployments()[name])["command"])
        calls, figures = policy["ingress"]
        assert calls["from"] == [{"podSelector": {"matchLabels": labels("orchestrator")}}]
        assert calls["ports"] == [{"port": parse_address(options.address)[1]}]
        assert figures["from"] == [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": PROMETHEUS_NAMESPACE}}}
        ]
        assert figures["ports"] == [{"port": parse_address(options.metrics_address)[1]}]


def test_the_namespace_that_may_read_figures_is_the_one_that_the_autoscaling_asks() -> None:
    triggers = [trigger for one in objects(*KEDA) for trigger in one["spec"]["triggers"]]
    hosts = {trigger["metadata"]["serverAddress"] for trigger in triggers}
    assert hosts == {f"http://prometheus.{PROMETHEUS_NAMESPACE}.svc:9090"}


def test_the_pod_monitor_reads_the_figures_of_every_pod_under_its_namespace() -> None:
    (monitor,) = objects(*MONITORING)
    assert (monitor["apiVersion"], monitor["kind"]) == ("monitoring.coreos.com/v1", "PodMonitor")
    assert monitor["metadata"]["namespace"] == "tandem"
    assert monitor["spec"].keys() == {"selector", "podMetricsEndpoints"}
    selector = monitor["spec"]["selector"]["matchLabels"]
    assert all(selector.items() <= labels(name).items() for name in NAMES)
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "metrics", "path": "/metrics", "interval": "15s"}


def test_deployments_name_no_number_of_replicas_that_would_undo_a_scaling() -> None:
    assert all("replicas" not in deployment["spec"] for deployment in deployments().values())
