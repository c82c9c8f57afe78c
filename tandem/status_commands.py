"""`tandem status` and `tandem health`: what a service says of itself."""

from typing import Annotated

import typer

from tandem import connection_options
from tandem.client import ReplicaInfo, SyncTandemClient, TandemError
from tandem.credentials import Credentials
from tandem.defaults import ORCHESTRATOR_ADDRESS
from tandem.health import HealthError, ask_health
from tandem.serving.channels import AddressError
from tandem.serving.pem import CredentialsError

_TIMEOUT_S = 5.0


def fail(message: str) -> typer.Exit:
    """One clear line on standard error, and exit code 2."""
    typer.echo(f"tandem: {message}", err=True)
    return typer.Exit(2)


def status(
    address: Annotated[str, typer.Option(help="The orchestrator's HOST:PORT.")] = ORCHESTRATOR_ADDRESS,
    tls_ca: connection_options.TlsCa = None,
    tls_client_cert: connection_options.TlsClientCert = None,
    tls_client_key: connection_options.TlsClientKey = None,
    tls_server_name: connection_options.TlsServerName = None,
    token_file: connection_options.TokenFile = None,
    insecure: connection_options.Insecure = False,
) -> None:
    """What an orchestrator serves, and the load of its services."""
    try:
        shown = connection_options.credentials(
            tls_ca, tls_client_cert, tls_client_key, tls_server_name, token_file, insecure
        )
        with SyncTandemClient(address, credentials=shown) as client:
            info = client.info(_TIMEOUT_S)
    except (TandemError, AddressError, CredentialsError) as error:
        raise fail(str(error)) from error
    typer.echo(f"requests     {info.num_running_requests} running")
    for replica in info.replicas:
        typer.echo(f"{replica.role:<12} {describe_replica(replica)}")
    if not info.drafts:
        typer.echo("draft        none")


def describe_replica(replica: ReplicaInfo) -> str:
    """What computes there, and how busy it is, on one line."""
    model, load = replica.model, replica.load
    name = f"{replica.address} {replica.proposer or model.model_id}"
    if not replica.is_connected:
        return f"{name}: NOT CONNECTED: {replica.problem}"
    numerics = "deterministic" if model.deterministic else "NOT deterministic"
    engine = f"{model.backend} {model.dtype}, {numerics}; " if model.backend else ""
    blocks = ""
    if load.total_blocks:
        blocks = f"{load.used_blocks} of {load.total_blocks} blocks in use, {load.cached_blocks} cached; "
    counts = (
        f"{load.preemptions} preemptions, {load.shrunk_draft_tokens} shrunk drafts, "
        f"{load.evicted_sessions} evicted sessions, {load.hit_blocks} cached blocks found, "
        f"{load.evicted_blocks} evicted, {load.stale_items} stale items"
    )
    return f"{name}: {engine}{load.running} sessions, {load.waiting} waiting; {blocks}since start: {counts}"


def health(
    address: Annotated[str, typer.Option(help="Any service's HOST:PORT.")] = ORCHESTRATOR_ADDRESS,
    tls_ca: connection_options.TlsCa = None,
    tls_client_cert: connection_options.TlsClientCert = None,
    tls_client_key: connection_options.TlsClientKey = None,
    tls_server_name: connection_options.TlsServerName = None,
) -> None:
    """Exit 0 when the service at the address says SERVING, 1 otherwise."""
    shown = Credentials(tls_ca, tls_client_cert, tls_client_key, tls_server_name)
    try:
        state = ask_health(address, _TIMEOUT_S, shown)
    except (AddressError, CredentialsError) as error:
        raise fail(str(error)) from error
    except HealthError as error:
        typer.echo(f"tandem: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(state)
    raise typer.Exit(0 if state == "SERVING" else 1)
