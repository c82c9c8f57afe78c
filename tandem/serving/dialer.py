"""Calls with credentials: in clear text or TLS, with a token or without, and in words why there is no connection."""

import logging
import re
from dataclasses import dataclass

import grpc

from tandem.credentials import Credentials
from tandem.serving.channels import (
    MAX_INNER_MESSAGE_BYTES,
    is_loopback,
    open_blocking_channel,
    open_channel,
    parse_address,
    why_not_connected,
)
from tandem.serving.handshakes import certificate_problem
from tandem.serving.pem import CredentialsError, WatchedFiles, check_pair, read_authorities, read_pair

_log = logging.getLogger(__name__)

_TOKEN = re.compile(r"[\x21-\x7e]+")  # what a header may hold, without spaces
# What TLS says of a failed handshake; the first that is found is meant.
_CERTIFICATE_PROBLEM = re.compile(r"CERTIFICATE_VERIFY_FAILED: (?P<reason>[^:]+)")
_UNKNOWN_AUTHORITY = (
    "unable to get local issuer certificate",
    "self signed certificate",
    "self-signed certificate",
)
_REFUSED = "Connection refused"
_CLOSED = re.compile(r"Socket closed|Connection reset|Broken pipe|End of TCP stream", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NoConnection:
    """Why there is none."""

    cause: str
    is_lasting: bool = False  # until somebody changes certificates or options


class Dialer:
    """Opens channels with one set of credentials, whose files are read at the start and by `refresh`."""

    def __init__(
        self,
        credentials: Credentials | None = None,
        max_message_bytes: int = MAX_INNER_MESSAGE_BYTES,
        max_received_bytes: int | None = None,
    ) -> None:
        """None: clear text, without a token. CredentialsError, naming option and file, for what cannot be used.

        `max_received_bytes`: of one message, where that is less than of one that is sent.
        """
        self._credentials = credentials or Credentials()
        self._max_message_bytes = max_message_bytes
        self._max_received_bytes = max_received_bytes
        paths = (self._credentials.tls_ca, self._credentials.tls_client_cert, self._credentials.tls_client_key)
        self._files = WatchedFiles(*(path for path in paths if path is not None))
        self._tls = _channel_credentials(self._credentials)
        self._version = 0  # grows with what the files say
        self.metadata = _metadata(self._credentials.token)  # of every call that a token may be asked for

    def check(self, address: str) -> None:
        """AddressError for what is not HOST:PORT, CredentialsError for where a token would travel in clear text."""
        parse_address(address)
        if self.metadata and self.is_overheard(address) and not self._credentials.insecure:
            raise CredentialsError(
                f"the token would travel in clear text to {address}, which is not a loopback address; use TLS "
                "(--tls-ca FILE), or accept that (--insecure)"
            )

    def refresh(self) -> int:
        """Read the TLS files again if they have changed -> how often that was: channels of another number are outdated.

        While the files cannot be used, what they said before holds.
        """
        if self._files.have_changed():
            try:
                self._tls = _channel_credentials(self._credentials)
            except CredentialsError as error:
                _log.error("%s; the certificates of before still hold", error)
            else:
                self._version += 1
        return self._version

    def is_overheard(self, address: str) -> bool:
        """Whether what is said leaves this machine in clear text."""
        return self._tls is None and not is_loopback(address)

    def open(self, address: str) -> grpc.aio.Channel:
        """A channel to HOST:PORT on the running event loop; raises as `check`."""
        self.check(address)
        return open_channel(
            address,
            self._max_message_bytes,
            self._tls,
            self._credentials.tls_server_name,
            self._max_received_bytes,
        )

    def open_blocking(self, address: str) -> grpc.Channel:
        """`open`, for threads."""
        self.check(address)
        return open_blocking_channel(address, self._max_message_bytes, self._tls, self._credentials.tls_server_name)

    def why_not_connected(self, address: str, details: str) -> NoConnection | None:
        """Why `address` cannot be called, from gRPC's words about it; None when they are about something else.

        May take up to a second where `address` is localhost.
        """
        cause = why_not_connected(details)
        if cause is None:
            return None
        if self._tls is not None and _REFUSED in cause:
            cause = certificate_problem(address, self._credentials) or cause
        problem = self._certificate_problem(cause)
        return NoConnection(self._in_words(cause)) if problem is None else NoConnection(problem, is_lasting=True)

    def _certificate_problem(self, cause: str) -> str | None:
        """What a failed connection's cause says of the server's certificate, or that it has none."""
        credentials = self._credentials
        problem = _CERTIFICATE_PROBLEM.search(cause)
        if problem is not None and problem["reason"] in _UNKNOWN_AUTHORITY:
            return f"the server's certificate is not signed by an authority of --tls-ca {credentials.tls_ca}"
        if problem is not None:
            return f"the server's certificate is refused: {problem['reason']}"
        if "Hostname Verification Check failed" in cause:
            wanted = (
                f"{credentials.tls_server_name!r}" if credentials.tls_server_name else "the host that was called"
            )
            return f"the server's certificate is not for {wanted}; --tls-server-name says which name it has"
        if "WRONG_VERSION_NUMBER" in cause:
            return "it does not speak TLS, and --tls-ca asks for that"
        return None

    def _in_words(self, cause: str) -> str:
        """What a connection that was closed may mean; other causes as they are."""
        credentials = self._credentials
        if not _CLOSED.search(cause):
            return cause
        if self._tls is None:
            return f"it ended the connection at once, as a service with TLS does; --tls-ca asks for that ({cause})"
        if credentials.tls_client_cert is None:
            return f"it ended the connection at once; it may want a client certificate, --tls-client-cert ({cause})"
        return (
            f"it ended the connection at once; it may not accept the certificate of --tls-client-cert "
            f"{credentials.tls_client_cert}: expired, or of an authority it does not know ({cause})"
        )


def _channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials | None:
    """None for clear text."""
    cert, key = credentials.tls_client_cert, credentials.tls_client_key
    check_pair("--tls-client-cert", cert, "--tls-client-key", key)
    if credentials.tls_ca is None:
        for option, given in (("--tls-client-cert", cert), ("--tls-server-name", credentials.tls_server_name)):
            if given is not None:
                raise CredentialsError(
                    f"{option} {given}: needs --tls-ca FILE as well, for without it there is no TLS"
                )
        return None
    authorities = read_authorities("--tls-ca", credentials.tls_ca)
    if cert is None or key is None:
        return grpc.ssl_channel_credentials(authorities)
    chain, private_key = read_pair("--tls-client-cert", cert, "--tls-client-key", key)
    return grpc.ssl_channel_credentials(authorities, private_key, chain)


def _metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """How a token travels; CredentialsError for one that cannot."""
    if token is None:
        return ()
    if not _TOKEN.fullmatch(token):
        raise CredentialsError("the token is empty, or has spaces or characters that are not printable ASCII")
    return (("authorization", f"Bearer {token}"),)
