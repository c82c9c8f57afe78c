"""Files named on a command line: read and checked at start, so that nobody meets them at the first connection."""

import logging
import ssl
import stat
from pathlib import Path

_log = logging.getLogger(__name__)


class CredentialsError(ValueError):
    """Certificates, keys or tokens that cannot be used; the message names option and file, never a secret."""


class WatchedFiles:
    """Tells when one of them has changed, been replaced, come or gone. Make it before they are read."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._state = self._look()

    def have_changed(self) -> bool:
        """Since this was last asked, or since the beginning."""
        before, self._state = self._state, self._look()
        return self._state != before

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_state, self._paths))


def _state(path: Path) -> tuple[int, int, int] | None:
    """None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_authorities(option: str, path: Path) -> bytes:
    """The certificates in the file, one at least; CredentialsError otherwise."""
    content = read_regular_file(option, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise CredentialsError(f"{option} {path}: holds no certificate in PEM form") from error
    return content


def read_pair(cert_option: str, cert: Path, key_option: str, key: Path) -> tuple[bytes, bytes]:
    """A certificate (with those between it and its authority, if any) and its key; CredentialsError otherwise."""
    cert_content = read_authorities(cert_option, cert)
    key_content = read_regular_file(key_option, key)
    asked: list[bool] = []  # for a passphrase, which nobody is there to type

    def no_passphrase() -> str:
        asked.append(True)
        return ""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, no_passphrase)
    except ssl.SSLError as error:
        if asked:
            problem = "is protected by a passphrase; give a key without one, readable by the service alone"
        elif "MISMATCH" in (error.reason or ""):
            problem = f"does not belong to the certificate of {cert_option} {cert}"
        else:
            problem = "holds no private key in PEM form"
        raise CredentialsError(f"{key_option} {key}: {problem}") from error
    warn_if_readable_by_others(key_option, key)
    return cert_content, key_content


def check_pair(cert_option: str, cert: Path | None, key_option: str, key: Path | None) -> None:
    """CredentialsError when one is given without the other."""
    if cert is not None and key is None:
        raise CredentialsError(f"{cert_option} {cert}: needs its key as well, {key_option} FILE")
    if key is not None and cert is None:
        raise CredentialsError(f"{key_option} {key}: needs its certificate as well, {cert_option} FILE")


def read_file(option: str, path: Path) -> bytes:
    """The content; CredentialsError saying why it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"{option} {path}: cannot be read: {error.strerror}") from error


def read_regular_file(option: str, path: Path) -> bytes:
    """`read_file` of what is there to be read again; a pipe would keep whoever reads it waiting."""
    # Through links. A folder, or nothing, is left to say itself what is wrong with it.
    if path.exists() and not path.is_file() and not path.is_dir():
        raise CredentialsError(f"{option} {path}: is not a regular file, such as can be read again")
    return read_file(option, path)


def warn_if_readable_by_others(option: str, path: Path) -> None:
    """A secret that every user of the machine can read is none."""
    if path.stat().st_mode & stat.S_IROTH:
        _log.warning("%s %s can be read by every user of this machine; chmod o-r it", option, path)
