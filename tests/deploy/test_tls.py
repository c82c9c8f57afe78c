"""With TLS the services of the deployment files are the same but for their options of TLS, and probes that speak it."""

import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tandem.cli import app
from tests.certificates import Authority
from tests.deploy.files import (
    BIN,
    COMPOSE,
    COMPOSE_TLS,
    PARSERS,
    TLS_PATCHES,
    compose_config,
    container,
    deployments,
    parsed,
)

EDGE = {"compose": "/tls/orchestrator", "kubernetes": "/edge/tls"}
INSIDE = {"compose": "/tls/{}", "kubernetes": "/tls/tls"}
SUFFIXES = {"compose": ("pem", "/tls/ca.pem"), "kubernetes": ("crt", "/tls/ca.crt")}


def patched(document: Any, patch: list[dict[str, Any]]) -> Any:
    """What RFC 6902 makes of it; of its operations those in use."""
    document = deepcopy(document)
    for operation in patch:
        *way, last = operation["path"].strip("/").split("/")
        place = document
        for step in way:
            place = place[int(step) if isinstance(place, list) else step]
        key: Any = int(last) if isinstance(place, list) and last != "-" else last
        match operation["op"]:
            case "test":
                assert place[key] == operation["value"]
            case "remove":
                del place[key]
            case "add" if key == "-":
                place.append(operation["value"])
            case "replace":
                assert key in place
                place[key] = operation["value"]
            case other:
                raise AssertionError(other)
    return document


def patch_of(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load((TLS_PATCHES / f"{name}.yaml").read_text()))


def with_tls(kind: str, name: str) -> tuple[list[str], list[list[str]]]:
    """The command line of a service, and those of its probes."""
    if kind == "compose":
        service = compose_config(COMPOSE, COMPOSE_TLS)["services"][name]
        return service["command"], [service["healthcheck"]["test"][1:]]
    served = container(patched(deployments()[name], patch_of(name)))
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    return served["command"], [served[probe]["exec"]["command"] for probe in probes]


@pytest.mark.parametrize("kind", ["compose", "kubernetes"])
@pytest.mark.parametrize("name", PARSERS)
def test_the_command_is_the_one_without_tls_but_for_its_options(kind: str, name: str) -> None:
    plain = (
        compose_config(COMPOSE)["services"][name]["command"]
        if kind == "compose"
        else container(deployments()[name])["command"]
    )
    command, _ = with_tls(kind, name)
    ours = [word for word in command if not word.startswith(("--tls-", "--tokens-file="))]
    assert ours == [word for word in plain if word != "--insecure"]
    options = parsed(name, command)
    suffix, ca = SUFFIXES[kind]
    own = EDGE[kind] if name == "orchestrator" else INSIDE[kind].format(name)
    assert (str(options.tls_cert), str(options.tls_key)) == (f"{own}.{suffix}", f"{own}.key")
    if name == "orchestrator":
        inside = INSIDE[kind].format(name)
        assert options.tls_client_ca is None
        assert str(options.tls_ca) == ca
        assert (str(options.tls_client_cert), str(options.tls_client_key)) == (
            f"{inside}.{suffix}",
            f"{inside}.key",
        )
        assert (options.target, options.draft) == ("dns:target:50051", "dns:draft:50052")  # certificates' names
    else:
        assert str(options.tls_client_ca) == ca


@pytest.mark.parametrize("kind", ["compose", "kubernetes"])
@pytest.mark.parametrize("name", PARSERS)
def test_probes_ask_in_tls_with_the_certificate_that_the_service_wants(
    kind: str, name: str, tmp_path: Path
) -> None:
    command, probes = with_tls(kind, name)
    options = parsed(name, command)
    authority = Authority(tmp_path)
    pair = authority.issue(name)
    files = {
        str(options.tls_cert): pair.cert,
        str(options.tls_key): pair.key,
        **{f"/{folder}/ca.{suffix}": authority.ca for folder in ("tls", "edge") for suffix in ("crt", "pem")},
    }
    port = options.address.rpartition(":")[2]
    for probe in probes:
        words = [part for word in probe for part in word.split("=", 1)]
        assert words[:3] == ["tandem", "health", "--address"]
        assert words[3] in (f"localhost:{port}", f"127.0.0.1:{port}")
        assert ("--tls-client-cert" in words) == (name != "orchestrator")
        here = [str(files.get(word, word)) for word in [*words[1:3], "127.0.0.1:1", *words[4:]]]
        asked = CliRunner().invoke(app, here)  # its options are understood, its files are a pair and an authority
        assert (asked.exit_code, asked.stderr.split(":")[:2]) == (1, ["tandem", " UNAVAILABLE"])


@pytest.mark.parametrize("name", PARSERS)
def test_a_patched_deployment_is_valid_and_mounts_its_secrets_for_itself_alone(name: str, tmp_path: Path) -> None:
    deployment = patched(deployments()[name], patch_of(name))
    path = tmp_path / "patched.yaml"
    path.write_text(yaml.safe_dump(deployment))
    checked = subprocess.run(
        [str(BIN / "kubernetes-validate"), "--strict", str(path)], check=False, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    secrets = [one for one in deployment["spec"]["template"]["spec"]["volumes"] if "secret" in one]
    assert [one["secret"] for one in secrets] == [
        {"secretName": f"{name}-{one['name']}", "defaultMode": 0o440} for one in secrets
    ]
    mounts = {one["name"]: one for one in container(deployment)["volumeMounts"]}
    assert all(mounts[one["name"]]["mountPath"] == f"/{one['name']}" for one in secrets)
    assert len(secrets) == (2 if name == "orchestrator" else 1)


def test_a_patch_for_another_command_line_fails() -> None:
    changed = deepcopy(deployments()["target"])
    container(changed)["command"].insert(3, "--log-format=json")
    with pytest.raises(AssertionError):
        patched(changed, patch_of("target"))
