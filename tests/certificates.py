"""Certificates for tests, made when they are needed: elliptic curves, valid for a day."""

import datetime
import ipaddress
import shutil
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from tandem.credentials import Credentials

_DAY = datetime.timedelta(days=1)
LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Pair:
    """Files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates; all files lie in its folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        certificate = self._sign(self._name, self._key, x509.BasicConstraints(True, None), _now() + _DAY)
        self.ca = self._folder / "ca.pem"
        self.ca.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(
        self,
        name: str,
        hosts: tuple[str, ...] = LOOPBACK,
        *,
        has_expired: bool = False,
        passphrase: bytes | None = None,
    ) -> Pair:
        """A certificate for these hosts, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        end = _now() - _DAY if has_expired else _now() + _DAY
        certificate = self._sign(_name(name), key, x509.BasicConstraints(False, None), end, hosts)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
        protection = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection))
        pair.key.chmod(0o600)
        return pair

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        constraints: x509.BasicConstraints,
        end: datetime.datetime,
        hosts: tuple[str, ...] = (),
    ) -> x509.Certificate:
        builder = x509.CertificateBuilder(
            self._name, subject, key.public_key(), x509.random_serial_number(), end - 3 * _DAY, end
        ).add_extension(constraints, critical=True)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(map(_host, hosts)), critical=False)
        return builder.sign(self._key, hashes.SHA256())


class Renewed:
    """A service's own files, first of one authority, later of another."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = Authority(folder, "old"), Authority(folder, "new")
        self.pairs = {one: one.issue("any") for one in (self.old, self.new)}
        self.pair, self.ca = Pair(folder / "cert.pem", folder / "cert.key"), folder / "ca.pem"
        self.say(self.old)

    def say(self, authority: Authority) -> None:
        """Each file is another one from now on, as when a secret is mounted anew."""
        named = ((authority.ca, self.ca), (self.pairs[authority].cert, self.pair.cert))
        for source, file in (*named, (self.pairs[authority].key, self.pair.key)):
            partial = file.with_suffix(".partial")
            shutil.copy(source, partial)
            partial.rename(file)

    def shown(self, authority: Authority) -> Credentials:
        """A client's, of this authority."""
        return Credentials(authority.ca, self.pairs[authority].cert, self.pairs[authority].key)

    @property
    def own(self) -> Credentials:
        """Of whatever the files say."""
        return Credentials(self.ca, self.pair.cert, self.pair.key)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
