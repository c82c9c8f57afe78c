"""Calls with and without tokens: who gets in, what the others are told, and whose name the log has."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.client import Credentials, SyncTandemClient, TandemClient, TandemError, UnauthenticatedError
from tandem.orchestrator.v1 import orchestrator_pb2 as pb
from tandem.serving.auth import TokenInterceptor
from tandem.serving.channels import open_channel
from tandem.serving.logs import JsonFormatter, TextFormatter
from tandem.serving.tokens import TokensFile
from tests.client.scripted_server import FULL, ScriptedServicer, serving

SHOP, OLD, STRANGER = "shop-0123456789abcdef", "old-0123456789abcdefg", "stranger-0123456789ab"
LOGGERS = ("deep", "tandem.serving.errors", "outer")


@pytest.fixture
def interceptor(tmp_path: Path) -> TokenInterceptor:
    path = tmp_path / "tokens"
    path.write_text(f"shop {SHOP}\nold {OLD} 2020-01-01\n")
    path.chmod(0o600)
    return TokenInterceptor(TokensFile(path))


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


@asynccontextmanager
async def called(interceptor: TokenInterceptor) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a running server that asks for tokens."""
    async with serving(ScriptedServicer(FULL), interceptors=[interceptor]) as address, open_channel(address) as one:
        yield one


async def calls_of(address: str, credentials: Credentials) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
    """A stream and a single answer, by each of the clients."""

    async def by_async(name: str) -> Any:
        async with TandemClient(address, credentials=credentials) as client:
            return await (client.complete("hi") if name == "complete" else client.info())

    async def by_sync(name: str) -> Any:
        def call() -> Any:
            with SyncTandemClient(address, credentials=credentials) as client:
                return client.complete("hi") if name == "complete" else client.info()

        return await asyncio.to_thread(call)

    return [lambda by=by, name=name: by(name) for by in (by_async, by_sync) for name in ("complete", "info")]


def test_a_known_token_lets_every_call_through(interceptor: TokenInterceptor) -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer(FULL)
        async with serving(servicer, interceptors=[interceptor]) as address:
            for call in await calls_of(address, Credentials(token=SHOP)):
                await call()
        assert len(servicer.requests) == 2

    run(scenario())


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (None, "no token was given; this service wants a bearer token: .*--token-file or TANDEM_TOKEN"),
        (STRANGER, "^UNAUTHENTICATED: the token is not known here$"),
        (SHOP + "x", "^UNAUTHENTICATED: the token is not known here$"),
        (OLD, r"the token of old expired at 2020-01-01T00:00:00\+00:00"),
    ],
)
def test_every_other_call_is_unauthenticated_and_nothing_of_it_runs(
    interceptor: TokenInterceptor, token: str | None, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        servicer = ScriptedServicer(FULL)
        async with serving(servicer, interceptors=[interceptor]) as address:
            for call in await calls_of(address, Credentials(token=token)):
                with pytest.raises(UnauthenticatedError, match=message) as caught:
                    await call()
                assert caught.value.code == "UNAUTHENTICATED"
                assert token is None or token not in str(caught.value)
        assert servicer.requests == []

    with caplog.at_level(logging.DEBUG):
        run(scenario())
    assert caplog.text.count("refused /tandem.orchestrator.v1.OrchestratorService/Generate of ipv4:127.0.0.1:") == 2
    assert caplog.text.count("refused /tandem.orchestrator.v1.OrchestratorService/GetInfo of ipv4:127.0.0.1:") == 2
    told = [(one.status, one.levelname) for one in caplog.records if hasattr(one, "status")]
    assert told == [("UNAUTHENTICATED", "WARNING")] * 4
    assert not [secret for secret in (SHOP, OLD, STRANGER) if secret in caplog.text]


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", SHOP),),
        (("authorization", f"Basic {SHOP}"),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {SHOP}"), ("authorization", f"Bearer {SHOP}")),
    ],
)
def test_metadata_that_is_not_one_bearer_token_is_said_to_be_that(
    interceptor: TokenInterceptor, metadata: tuple[tuple[str, str], ...]
) -> None:
    async def scenario() -> None:
        async with called(interceptor) as channel:
            method = channel.unary_unary("/tandem.orchestrator.v1.OrchestratorService/GetInfo")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(b"", metadata=metadata, timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        details = str(caught.value.details())
        assert details.startswith("the authorization metadata is not one bearer token; ")
        assert SHOP not in details

    run(scenario())


def test_the_scheme_may_be_written_in_any_case(interceptor: TokenInterceptor) -> None:
    async def scenario() -> None:
        async with called(interceptor) as channel:
            method = channel.unary_unary("/tandem.orchestrator.v1.OrchestratorService/GetInfo")
            answer = await method(b"", metadata=(("authorization", f"bearer {SHOP}"),), timeout=20)
        assert pb.GetInfoResponse.FromString(answer).num_running_requests == 2

    run(scenario())


def test_health_is_open_to_all(interceptor: TokenInterceptor) -> None:
    async def scenario() -> None:
        async with called(interceptor) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    run(scenario())


def test_what_is_logged_of_a_call_has_the_name_of_its_token_and_nothing_else_has(
    interceptor: TokenInterceptor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(ScriptedServicer):
        async def GetInfo(self, request: Any, context: Any) -> pb.GetInfoResponse:
            await asyncio.create_task(self.work())
            raise RuntimeError("a bug")

        async def work(self) -> None:
            logging.getLogger("deep").info("in a task of the call")

    async def scenario() -> None:
        async with serving(Broken(FULL), interceptors=[interceptor]) as address:
            logging.getLogger("outer").info("in no call")
            async with TandemClient(address, credentials=Credentials(token=SHOP)) as client:
                with pytest.raises(TandemError, match="INTERNAL"):
                    await client.info()

    monkeypatch.setattr(caplog.handler, "formatter", TextFormatter("orchestrator"))
    with caplog.at_level(logging.INFO):
        run(scenario())
    lines = {name: next(line for line in caplog.text.splitlines() if f" {name}: " in line) for name in LOGGERS}
    assert ["caller=shop" in lines[name] for name in LOGGERS] == [True, True, False]
    assert SHOP not in caplog.text


@pytest.mark.parametrize("formatter", [TextFormatter, JsonFormatter])
def test_no_token_is_in_any_line_of_any_level_whatever_becomes_of_the_call(
    formatter: type[logging.Formatter],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "renewed"
    path.write_text(f"shop {SHOP}\n")
    interceptor = TokenInterceptor(TokensFile(path))
    shop, stranger = Credentials(token=SHOP), Credentials(token=STRANGER)

    async def scenario() -> None:
        for servicer in (ScriptedServicer(FULL), ScriptedServicer(FULL, RuntimeError("a bug"))):
            async with serving(servicer, interceptors=[interceptor]) as address:
                for credentials in (shop, stranger):
                    for call in await calls_of(address, credentials):
                        with contextlib.suppress(TandemError):
                            await call()
                    logging.getLogger("application").debug("%r", credentials)
        for text in (f"shop {SHOP} never", f"shop {SHOP}\nbatch {SHOP}", f"batch {SHOP}\n# renewed"):
            path.write_text(text)
            async with serving(ScriptedServicer(FULL), interceptors=[interceptor]) as address:
                for call in await calls_of(address, shop):
                    await call()

    monkeypatch.setattr(caplog.handler, "formatter", formatter("orchestrator"))
    with caplog.at_level(logging.DEBUG):
        run(scenario())
    for told in ("a bug", "not known here", "tokens of before", "read again", "application"):
        assert told in caplog.text
    assert not [secret for secret in (SHOP, STRANGER) if secret in caplog.text]
