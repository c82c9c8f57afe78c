"""Certificates are renewed while a service runs: by new connections, at both ends."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.client import Credentials, TandemClient, UnavailableError
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.serving.dialer import Dialer
from tandem.serving.server_tls import ServerTls
from tests.certificates import Authority, Renewed
from tests.client.scripted_server import FULL, ScriptedServicer, serving


@pytest.fixture
def renewed(tmp_path: Path) -> Renewed:
    return Renewed(tmp_path)


async def asked(address: str, credentials: Credentials) -> str:
    """Over a connection of its own."""
    async with TandemClient(address, credentials=credentials) as client:
        return (await client.complete("hi", timeout=20)).text


def test_a_server_shows_and_asks_for_new_certificates_and_keeps_the_connections_it_has(renewed: Renewed) -> None:
    async def scenario() -> None:
        tls = ServerTls(renewed.pair.cert, renewed.pair.key, renewed.ca)
        async with (
            serving(ScriptedServicer(FULL), tls) as address,
            TandemClient(address, credentials=renewed.shown(renewed.old)) as connected,
        ):
            expected = (await connected.complete("hi")).text
            renewed.say(renewed.new)
            assert await asked(address, renewed.shown(renewed.new)) == expected
            with pytest.raises(UnavailableError, match="not signed by an authority"):
                await asked(address, renewed.shown(renewed.old))
            assert (await connected.complete("hi")).text == expected

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_answer_that_runs_while_certificates_are_renewed_goes_on_to_its_end(renewed: Renewed) -> None:
    class Slow(ScriptedServicer):
        def __init__(self) -> None:
            super().__init__(FULL)
            self.may_go_on = asyncio.Event()

        async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
            async for event in super().Generate(request, context):
                yield event
                if event.WhichOneof("event") == "chunk":
                    await self.may_go_on.wait()

    async def scenario() -> None:
        servicer, tls = Slow(), ServerTls(renewed.pair.cert, renewed.pair.key, renewed.ca)
        async with (
            serving(servicer, tls) as address,
            TandemClient(address, credentials=renewed.shown(renewed.old)) as client,
        ):
            generation = client.generate("hi")
            chunks = aiter(generation)
            assert (await anext(chunks)).text == "a"
            renewed.say(renewed.new)
            with pytest.raises(UnavailableError, match="not signed by an authority"):
                await asked(address, renewed.shown(renewed.old))
            servicer.may_go_on.set()
            assert await asked(address, renewed.shown(renewed.new)) == "abc"
            assert [chunk.text async for chunk in chunks] == ["bc"]
            assert generation.result.text == "abc"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_files_that_cannot_be_used_are_told_in_the_log_and_those_of_before_hold(
    renewed: Renewed, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        tls = ServerTls(renewed.pair.cert, renewed.pair.key, renewed.ca)
        async with serving(ScriptedServicer(FULL), tls) as address:
            renewed.pair.key.write_text("half of a ke")
            assert await asked(address, renewed.shown(renewed.old))
            renewed.say(renewed.new)
            assert await asked(address, renewed.shown(renewed.new))

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(scenario(), 60))
    assert (
        f"--tls-key {renewed.pair.key}: holds no private key in PEM form; the certificates of before" in caplog.text
    )
    assert f"--tls-cert {renewed.pair.cert}: read again" in caplog.text


def test_the_port_of_another_server_renews_as_well_and_takes_nothing_from_grpcs(renewed: Renewed) -> None:
    async def greeting(port: int, authority: Authority, shown: Authority) -> bytes:
        context = ssl.create_default_context(cafile=authority.ca)
        context.load_cert_chain(renewed.pairs[shown].cert, renewed.pairs[shown].key)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        except ssl.SSLCertVerificationError:
            return b"not known"
        try:
            return await reader.read()
        except (ssl.SSLError, ConnectionError):
            return b""
        finally:
            writer.transport.abort()

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async def scenario() -> None:
        tls = ServerTls(renewed.pair.cert, renewed.pair.key, renewed.ca)
        async with (
            await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls.context()) as server,
            serving(ScriptedServicer(FULL), tls) as address,
        ):
            port = server.sockets[0].getsockname()[1]
            assert await greeting(port, renewed.old, renewed.old) == b"hello"
            assert await greeting(port, renewed.old, renewed.new) == b""
            renewed.say(renewed.new)
            assert await greeting(port, renewed.new, renewed.new) == b"hello"
            assert await greeting(port, renewed.new, renewed.old) == b""
            assert await greeting(port, renewed.old, renewed.old) == b"not known"
            assert await asked(address, renewed.shown(renewed.new))

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_dialers_channels_are_outdated_once_its_files_say_something_else(
    renewed: Renewed, caplog: pytest.LogCaptureFixture
) -> None:
    dialer = Dialer(Credentials(renewed.ca, renewed.pair.cert, renewed.pair.key))
    first = dialer.refresh()
    assert dialer.refresh() == first
    renewed.ca.write_text("no certificate")
    assert dialer.refresh() == first
    assert f"--tls-ca {renewed.ca}: holds no certificate" in caplog.text
    renewed.say(renewed.new)
    assert dialer.refresh() == dialer.refresh() != first
