"""What a server shows of itself, and whom it lets in, before a call begins."""

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tandem.serving.pem import CredentialsError, check_pair, read_authorities, read_pair


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM contents."""

    cert_chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None  # only clients with a certificate that one of these has signed get in

    def credentials(self) -> grpc.ServerCredentials:
        """For a port."""
        return grpc.ssl_server_credentials(
            [(self.key, self.cert_chain)], self.client_ca, require_client_auth=self.client_ca is not None
        )


def read_server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """What --tls-cert, --tls-key and --tls-client-ca name; None without any: clear text.

    CredentialsError, naming option and file, for what cannot be used.
    """
    check_pair("--tls-cert", cert, "--tls-key", key)
    if cert is None or key is None:
        if client_ca is not None:
            raise CredentialsError(f"--tls-client-ca {client_ca}: needs --tls-cert FILE and --tls-key FILE as well")
        return None
    chain, private_key = read_pair("--tls-cert", cert, "--tls-key", key)
    return ServerTls(
        chain, private_key, None if client_ca is None else read_authorities("--tls-client-ca", client_ca)
    )
