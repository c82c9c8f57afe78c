"""What a client shows of itself, and whom it believes. An application gives it to a client, a command its options."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Credentials:
    """Nothing said is clear text without a token. The files are PEM and named as the commands' options are.

    A client refuses to send a token in clear text to an address that is not loopback, unless it is `insecure`.
    """

    tls_ca: Path | None = None  # authorities, one of which must have signed the server's certificate; None: no TLS
    tls_client_cert: Path | None = None  # shown to servers that ask for one
    tls_client_key: Path | None = None
    tls_server_name: str | None = None  # in the server's certificate; None: the host that is called
    token: str | None = field(default=None, repr=False)
    insecure: bool = False
