"""What a server shows of itself, and whom it lets in, before a call begins."""

import logging
import ssl
from pathlib import Path
from typing import Any

import grpc

from tandem.serving.pem import CredentialsError, WatchedFiles, check_pair, read_authorities, read_pair

_log = logging.getLogger(__name__)


class ServerTls:
    """A certificate, its key and, for mutual TLS, whose clients get in.

    The files are looked at before every handshake and read again when they have changed; while they cannot be used,
    what they said before holds. Connections that stand are not asked again.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        """PEM files; CredentialsError, naming option and file, for what cannot be used."""
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._files = WatchedFiles(cert, key, *(() if client_ca is None else (client_ca,)))
        self._read()

    @property
    def is_mutual(self) -> bool:
        """Whether only clients with a certificate get in."""
        return self._client_ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """For a port of gRPC."""
        told = self._configuration

        def news() -> Any:
            """None: what it was told last still holds. Others look at the files as well, and may have read them."""
            nonlocal told
            self._refresh()
            if told is self._configuration:
                return None
            told = self._configuration
            return told

        return grpc.dynamic_ssl_server_credentials(told, news, self.is_mutual)

    def context(self) -> ssl.SSLContext:
        """For another server's port."""
        context = self._new_context()

        def renew(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            self._refresh()
            connection.context = self._context

        context.sni_callback = renew  # called without a name as well
        return context

    def _refresh(self) -> None:
        """Read the files if they have changed."""
        if not self._files.have_changed():
            return
        try:
            self._read()
        except (CredentialsError, OSError) as error:  # the latter when they change while they are read
            _log.error("%s; the certificates of before still hold", error)
        else:
            _log.info("--tls-cert %s: read again", self._cert)

    def _read(self) -> None:
        chain, key = read_pair("--tls-cert", self._cert, "--tls-key", self._key)
        authorities = None if self._client_ca is None else read_authorities("--tls-client-ca", self._client_ca)
        self._context = self._new_context()
        self._configuration: Any = grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._cert, self._key)
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cafile=self._client_ca)
        return context


def read_server_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    """What --tls-cert, --tls-key and --tls-client-ca name; None without any: clear text.

    CredentialsError, naming option and file, for what cannot be used.
    """
    check_pair("--tls-cert", cert, "--tls-key", key)
    if cert is None or key is None:
        if client_ca is not None:
            raise CredentialsError(f"--tls-client-ca {client_ca}: needs --tls-cert FILE and --tls-key FILE as well")
        return None
    return ServerTls(cert, key, client_ca)
