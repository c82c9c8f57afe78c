"""The options by which commands reach a service: TLS, a client certificate, a token.

A token itself is no option: every user of the machine sees a process's arguments.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tandem.credentials import Credentials
from tandem.serving.pem import CredentialsError, read_file, warn_if_readable_by_others

TlsCa = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Call with TLS: authorities, one of which signed the service's certificate (PEM).",
    ),
]
TlsClientCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Mutual TLS: the certificate to show (PEM)."),
]
TlsClientKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The certificate's key (PEM, no passphrase)."),
]
TlsServerName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The name in the service's certificate. Default: the host of the address.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Holds the bearer token to send. Default: the token in TANDEM_TOKEN, else none.",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Send the token in clear text to an address that is not loopback.",
    ),
]


def read_token(path: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """What the file holds, or TANDEM_TOKEN; None without either. CredentialsError, naming the file, for no token."""
    if path is None:
        return environment.get("TANDEM_TOKEN") or None
    words = read_file("--token-file", path).split()
    if len(words) != 1 or not words[0].isascii():
        raise CredentialsError(f"--token-file {path}: holds {len(words)} words and not one token")
    warn_if_readable_by_others("--token-file", path)
    return words[0].decode()


def credentials(
    tls_ca: Path | None,
    tls_client_cert: Path | None,
    tls_client_key: Path | None,
    tls_server_name: str | None,
    token_file: Path | None,
    insecure: bool,
) -> Credentials:
    """What the options say; CredentialsError for a file without a token."""
    return Credentials(tls_ca, tls_client_cert, tls_client_key, tls_server_name, read_token(token_file), insecure)
