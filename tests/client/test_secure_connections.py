"""Connections that must not be: each is refused as UNAVAILABLE, and the client says what is wrong."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.client import Credentials, SyncTandemClient, TandemClient, UnavailableError
from tandem.client_resume import Patience
from tandem.serving.dialer import Dialer, NoConnection
from tandem.serving.server_tls import ServerTls, read_server_tls
from tests.certificates import Authority, Pair
from tests.client.scripted_server import FULL, ScriptedServicer, serving


@dataclass(frozen=True)
class Certificates:
    """One authority's, and another's."""

    ours: Authority
    others: Authority
    server: Pair
    client: Pair

    def tls(self, server: Pair | None = None) -> ServerTls:
        """Without client certificates."""
        pair = server or self.server
        tls = read_server_tls(pair.cert, pair.key, None)
        assert tls is not None
        return tls

    def mutual_tls(self) -> ServerTls:
        tls = read_server_tls(self.server.cert, self.server.key, self.ours.ca)
        assert tls is not None
        return tls

    def showing(self, pair: Pair) -> Credentials:
        return Credentials(self.ours.ca, pair.cert, pair.key)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder: Path = tmp_path_factory.mktemp("certificates")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    return Certificates(ours, others, ours.issue("server"), ours.issue("client"))


async def text_of(tls: ServerTls | None, credentials: Credentials | None, kind: str, resume: bool) -> str:
    """What one call by the async or the sync client brings."""
    async with serving(ScriptedServicer(FULL), tls) as address:
        if kind == "async":
            async with TandemClient(address, resume, credentials) as client:
                return (await client.complete("hi", timeout=20)).text

        def call() -> str:
            with SyncTandemClient(address, resume, credentials) as client:
                return client.complete("hi", timeout=20).text

        return await asyncio.to_thread(call)


def outcome(tls: ServerTls | None, credentials: Credentials | None, kind: str, resume: bool = False) -> str:
    return asyncio.run(asyncio.wait_for(text_of(tls, credentials, kind, resume), 60))


Choice = Callable[[Certificates], tuple[ServerTls | None, Credentials | None]]
BOTH = pytest.mark.parametrize("kind", ["async", "sync"])


@BOTH
@pytest.mark.parametrize(
    "choice",
    [
        lambda one: (one.tls(), Credentials(one.ours.ca)),
        lambda one: (one.mutual_tls(), one.showing(one.client)),
        lambda one: (
            one.tls(one.ours.issue("x", ("elsewhere",))),
            Credentials(one.ours.ca, tls_server_name="elsewhere"),
        ),
    ],
    ids=["tls", "mutual", "named"],
)
def test_certificates_that_fit_let_a_call_through(certificates: Certificates, choice: Choice, kind: str) -> None:
    assert outcome(*choice(certificates), kind) == "abc"


REFUSED: dict[str, tuple[Choice, str]] = {
    "no client certificate": (
        lambda one: (one.mutual_tls(), Credentials(one.ours.ca)),
        "it may want a client certificate, --tls-client-cert",
    ),
    "client certificate of another authority": (
        lambda one: (one.mutual_tls(), one.showing(one.others.issue("stranger"))),
        r"may not accept the certificate of --tls-client-cert \S+stranger.pem",
    ),
    "expired client certificate": (
        lambda one: (one.mutual_tls(), one.showing(one.ours.issue("late", has_expired=True))),
        r"may not accept the certificate of --tls-client-cert \S+late.pem: expired, or",
    ),
    "server certificate of another authority": (
        lambda one: (one.tls(one.others.issue("impostor")), Credentials(one.ours.ca)),
        r"the server's certificate is not signed by an authority of --tls-ca \S+ca.pem",
    ),
    "server certificate of another name": (
        lambda one: (one.tls(one.ours.issue("y", ("elsewhere",))), Credentials(one.ours.ca)),
        "the server's certificate is not for the host that was called; --tls-server-name",
    ),
    "server certificate of another name than asked for": (
        lambda one: (one.tls(), Credentials(one.ours.ca, tls_server_name="elsewhere")),
        "the server's certificate is not for 'elsewhere'",
    ),
    "expired server certificate": (
        lambda one: (one.tls(one.ours.issue("old", has_expired=True)), Credentials(one.ours.ca)),
        "the server's certificate is refused: certificate has expired",
    ),
    "clear text to TLS": (
        lambda one: (one.tls(), None),
        "ended the connection at once, as a service with TLS does; --tls-ca asks for that",
    ),
    "TLS to clear text": (
        lambda one: (None, Credentials(one.ours.ca)),
        "it does not speak TLS, and --tls-ca asks for that",
    ),
}


@BOTH
@pytest.mark.parametrize(("choice", "message"), REFUSED.values(), ids=REFUSED)
def test_certificates_that_do_not_fit_are_refused_and_the_client_says_why(
    certificates: Certificates, choice: Choice, message: str, kind: str
) -> None:
    with pytest.raises(UnavailableError, match=message) as caught:
        outcome(*choice(certificates), kind)
    assert caught.value.code == "UNAVAILABLE"
    assert "no Tandem service answers at 127.0.0.1:" in caught.value.message


LASTING = [name for name in REFUSED if "server certificate" in name or name == "TLS to clear text"]


@BOTH
@pytest.mark.parametrize("name", LASTING)
def test_what_no_wait_makes_right_is_refused_at_once_by_a_client_that_goes_on_by_itself(
    certificates: Certificates, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Patience, "wait_s", lambda *_: pytest.fail("it waits"))
    choice, message = REFUSED[name]
    with pytest.raises(UnavailableError, match=message) as caught:
        outcome(*choice(certificates), kind, resume=True)
    assert caught.value.is_lasting


def test_a_certificate_that_is_refused_at_one_address_does_not_keep_a_client_from_the_next(
    certificates: Certificates,
) -> None:
    async def scenario() -> str:
        impostor = certificates.tls(certificates.others.issue("impostor"))
        async with (
            serving(ScriptedServicer(FULL), impostor) as wrong,
            serving(ScriptedServicer(FULL), certificates.tls()) as right,
            TandemClient(f"{wrong},{right}", True, Credentials(certificates.ours.ca)) as client,
        ):
            return (await client.complete("hi", timeout=20)).text

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == "abc"


@pytest.mark.parametrize(
    "choice", [REFUSED[name] for name in REFUSED if "server cert" in name], ids=lambda one: one[1]
)
def test_at_localhost_the_certificate_is_named_although_its_other_address_is_the_last_to_refuse(
    certificates: Certificates, choice: tuple[Choice, str]
) -> None:
    async def scenario() -> NoConnection | None:
        tls, credentials = choice[0](certificates)
        async with serving(ScriptedServicer(FULL), tls) as address:
            port = address.rpartition(":")[2]
            refused = (
                f"failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:{port}: Failed to connect to "
                "remote host: Connection refused"
            )
            dialer = Dialer(credentials)
            assert dialer.why_not_connected(address, refused) == NoConnection("Connection refused")
            return await asyncio.to_thread(dialer.why_not_connected, f"localhost:{port}", refused)

    found = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert found is not None
    assert found.is_lasting
    assert re.search(choice[1], found.cause)


def test_at_localhost_what_is_not_there_and_what_is_believed_is_refused_as_grpc_says(
    certificates: Certificates,
) -> None:
    async def scenario() -> None:
        dialer = Dialer(Credentials(certificates.ours.ca))
        refused = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
        async with serving(ScriptedServicer(FULL), certificates.tls()) as address:
            for port in (address.rpartition(":")[2], "1"):
                found = await asyncio.to_thread(dialer.why_not_connected, f"localhost:{port}", refused)
                assert found == NoConnection("Connection refused")

    asyncio.run(asyncio.wait_for(scenario(), 60))
