"""The command: look at everything, a line each, and say by the exit code whether there is a PROBLEM."""

from collections.abc import Iterator
from itertools import chain
from typing import Annotated

import typer

from tandem import connection_options
from tandem.client import SyncTandemClient, TandemError
from tandem.credentials import Credentials
from tandem.doctor.findings import Finding, exit_code, ok, problem
from tandem.doctor.machine import read_machine
from tandem.doctor.machine_checks import (
    WEIGHT_BYTES,
    check_instructions,
    check_memory,
    check_models,
    check_ports,
    check_threads,
)
from tandem.doctor.packages import check_packages, check_python, installed_version
from tandem.doctor.service_checks import check_server
from tandem.doctor.torch_facts import TorchProbeError, ask_torch
from tandem.health import HealthError, ask_health
from tandem.installing import how_to_install
from tandem.models import default_models_dir
from tandem.serving.channels import AddressError
from tandem.serving.dialer import Dialer
from tandem.serving.pem import CredentialsError
from tandem.status_commands import fail

_TIMEOUT_S = 5.0
_PORT_TIMEOUT_S = 1.0


def doctor(
    address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="An orchestrator to look at as well.")
    ] = None,
    model: Annotated[str, typer.Option(help="Whose needs this machine is held against.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    port: Annotated[int, typer.Option(min=1, max=65533, help="The first of the three services' ports.")] = 50050,
    tls_ca: connection_options.TlsCa = None,
    tls_client_cert: connection_options.TlsClientCert = None,
    tls_client_key: connection_options.TlsClientKey = None,
    tls_server_name: connection_options.TlsServerName = None,
    token_file: connection_options.TokenFile = None,
    insecure: connection_options.Insecure = False,
) -> None:
    """Look at this machine, and at an orchestrator: a line each, and exit code 1 when there is a PROBLEM."""
    if dtype not in WEIGHT_BYTES:
        raise fail(f"--dtype {dtype!r} is unknown; there are: {', '.join(WEIGHT_BYTES)}")
    try:
        shown = connection_options.credentials(
            tls_ca, tls_client_cert, tls_client_key, tls_server_name, token_file, insecure
        )
        Dialer(shown)  # for files that cannot be used
    except CredentialsError as error:
        raise fail(str(error)) from error
    findings = []
    there = _orchestrator(address, shown) if address else ()
    for finding in chain(_machine(model, dtype, port, shown), there):
        typer.echo(str(finding))
        findings.append(finding)
    raise typer.Exit(exit_code(findings))


def _machine(model: str, dtype: str, port: int, shown: Credentials) -> Iterator[Finding]:
    yield check_python()
    yield from check_packages()
    yield from check_models(model, default_models_dir())
    yield from check_ports(port, lambda address: why_not_serving(address, shown))
    if installed_version("torch") is None:
        return  # said among the packages
    machine = read_machine()
    try:
        torch = ask_torch()
    except TorchProbeError as error:
        yield problem("torch", f"cannot be loaded: {error}", f"install it again: {how_to_install('engine')}")
        return
    yield check_threads(machine, torch)
    yield check_instructions(machine, torch, dtype)
    yield check_memory(machine, torch, model, dtype)


def why_not_serving(address: str, shown: Credentials) -> str:
    """Empty when a healthy service answers there."""
    try:
        state = ask_health(address, _PORT_TIMEOUT_S, shown)
    except HealthError as error:
        return str(error)
    return "" if state == "SERVING" else f"it says {state}"


def _orchestrator(address: str, shown: Credentials) -> Iterator[Finding]:
    try:
        state = ask_health(address, _TIMEOUT_S, shown)
        if state == "SERVING":
            yield ok(address, "says SERVING")
        else:
            yield problem(address, f"says {state}", "it starts or ends, or its engine hangs: look at its log")
        with SyncTandemClient(address, credentials=shown) as client:
            info = client.info(_TIMEOUT_S)
    except (HealthError, TandemError, AddressError, CredentialsError) as error:
        yield problem(address, str(error), "is an orchestrator up there, and is this its address?")
        return
    yield from check_server(info)
