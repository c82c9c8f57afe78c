"""Reflection is off unless asked for, and asks for a token like any other call."""

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.orchestrator.v1 import orchestrator_pb2_grpc
from tandem.serving.auth import TokenInterceptor
from tandem.serving.channels import open_channel
from tandem.serving.life import ServerSettings, run_server
from tandem.serving.tokens import TokensFile
from tests.client.scripted_server import FULL, ScriptedServicer

NAME = "tandem.orchestrator.v1.OrchestratorService"
TOKEN = "shop-0123456789abcdef"


async def listed(tmp_path: Path, reflection: bool, metadata: tuple[tuple[str, str], ...] = ()) -> set[str]:
    """The services that a server with a tokens file lists."""
    tokens, ready = tmp_path / "tokens", tmp_path / "ready"
    tokens.write_text(f"shop {TOKEN}")
    tokens.chmod(0o600)
    settings = ServerSettings(NAME, "127.0.0.1:0", 1 << 20, ready_file=ready, reflection=reflection)
    task = asyncio.create_task(
        run_server(
            settings,
            lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(
                ScriptedServicer(FULL), server
            ),
            interceptors=[TokenInterceptor(TokensFile(tokens))],
        )
    )
    try:
        while not ready.exists():
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        async with open_channel(ready.read_text().strip()) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            call = stub.ServerReflectionInfo(iter([question]), metadata=metadata, timeout=20)
            return {service.name async for answer in call for service in answer.list_services_response.service}
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 30)


def refusal(tmp_path: Path, reflection: bool, metadata: tuple[tuple[str, str], ...]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(listed(tmp_path, reflection, metadata))
    return caught.value.code()


def test_it_lists_the_services_when_it_is_on_to_whoever_may_call(tmp_path: Path) -> None:
    token = (("authorization", f"Bearer {TOKEN}"),)
    assert asyncio.run(listed(tmp_path, True, token)) == {
        NAME,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    (tmp_path / "ready").unlink()
    assert refusal(tmp_path, True, ()) is grpc.StatusCode.UNAUTHENTICATED


def test_it_is_off_by_default(tmp_path: Path) -> None:
    assert not ServerSettings(NAME, "127.0.0.1:0", 1).reflection
    assert refusal(tmp_path, False, (("authorization", f"Bearer {TOKEN}"),)) is grpc.StatusCode.UNIMPLEMENTED
