"""Links to replicas in mutual TLS: certificates for the name that was looked up, and new ones after a renewal."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.__main__ import _credentials, build_parser
from orchestrator.addresses import shared_host
from orchestrator.breaker import Backoff
from orchestrator.replica_api import TARGET_API
from orchestrator.replica_link import LinkLostError, ReplicaLink, TargetLink
from tandem.serving.dialer import Dialer
from tandem.serving.server_tls import ServerTls
from tandem.target.v1 import target_pb2_grpc
from tests.certificates import Authority, Pair, Renewed
from tests.orchestrator.fakes import until
from tests.orchestrator.test_replica_link import FakeTarget, answer, item


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


@asynccontextmanager
async def serving(
    target: FakeTarget, pair: Pair, client_ca: Path, address: str = "127.0.0.1:0"
) -> AsyncIterator[str]:
    """The address of a target that lets in clients of this authority's."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    port = server.add_secure_port(address, ServerTls(pair.cert, pair.key, client_ca).credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def linked(address: str, dialer: Dialer) -> AsyncIterator[TargetLink]:
    link: TargetLink = ReplicaLink(TARGET_API, address, backoff=Backoff(0.01, 0.02), dialer=dialer)
    link.start()
    try:
        yield link
    finally:
        await link.close()


def test_replicas_of_one_name_share_it_and_no_others_do() -> None:
    assert shared_host("dns:target:50051") == "target"
    assert shared_host("dns:[::1]:50051") == "::1"
    assert [shared_host(text) for text in ("target:50051", "a:1,b:2", "file:/dns:x:1")] == [None] * 3


@pytest.mark.parametrize(
    ("found_at", "options", "is_let_in"),
    [
        ("dns:target:50051", [], True),
        ("dns:draft:50051", [], False),
        ("dns:draft:50051", ["--tls-server-name", "target"], True),
        ("127.0.0.1:50051", [], False),
        ("127.0.0.1:50051", ["--tls-server-name", "target"], True),
    ],
)
def test_a_replica_that_was_looked_up_must_show_a_certificate_for_the_name_that_was(
    found_at: str, options: list[str], is_let_in: bool, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    target, own = authority.issue("target", ("target",)), authority.issue("own", ("orchestrator",))
    shown = ["--tls-ca", str(authority.ca), "--tls-client-cert", str(own.cert), "--tls-client-key", str(own.key)]
    parsed = build_parser().parse_args(["--toy-vocab", "8", "--target", found_at, *shown, *options])
    dialer = Dialer(_credentials(parsed, found_at))

    async def scenario() -> None:
        async with serving(FakeTarget(), target, authority.ca) as address, linked(address, dialer) as link:
            if is_let_in:
                await link.wait_checked(20)
            else:
                with pytest.raises(LinkLostError, match="the server's certificate is not for"):
                    await link.wait_checked(2)

    run(scenario())


def test_a_name_to_look_up_is_no_wish_for_tls() -> None:
    options = build_parser().parse_args(["--toy-vocab", "8", "--target", "dns:target:50051"])
    assert Dialer(_credentials(options, options.target)).is_overheard("10.0.0.1:1")


def test_a_link_that_is_made_again_shows_and_believes_what_its_files_say_by_then(tmp_path: Path) -> None:
    files = Renewed(tmp_path)

    async def scenario() -> None:
        async with serving(FakeTarget(), files.pair, files.ca) as address:
            link = ReplicaLink(TARGET_API, address, backoff=Backoff(0.01, 0.02), dialer=Dialer(files.own))
            link.start()
            await link.wait_checked(20)
        files.say(files.new)
        async with serving(FakeTarget(), files.pair, files.ca, address):
            await until(lambda: link.generation == 2 and link.is_up)
        await link.close()

    run(scenario())


def test_a_link_that_stands_is_left_alone_when_its_files_change(tmp_path: Path) -> None:
    files, target = Renewed(tmp_path), FakeTarget()

    async def scenario() -> None:
        async with serving(target, files.pair, files.ca) as address, linked(address, Dialer(files.own)) as link:
            await link.wait_checked(20)
            await answer(link.request(item(1)))
            files.say(files.new)
            await answer(link.request(item(2)))
            assert link.generation == target.num_streams == 1
            target.hang_up()
            await until(lambda: link.generation == 2)
            assert (await answer(link.request(item(3)))).stamp.round == 3

    run(scenario())
