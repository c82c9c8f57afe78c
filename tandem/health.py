"""Asking a service for its health."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.client_errors import describe_rpc_error
from tandem.credentials import Credentials
from tandem.serving.dialer import Dialer


class HealthError(Exception):
    """No answer; the message says why, after the gRPC status by name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")


def ask_health(address: str, timeout_s: float, credentials: Credentials | None = None) -> str:
    """SERVING, NOT_SERVING, ... of the whole process; `credentials`: None for clear text.

    HealthError when no answer comes, AddressError and CredentialsError for what cannot be used.
    """
    dialer = Dialer(credentials)

    async def check() -> int:
        async with dialer.open(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs lack the methods
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
            return int(answer.status)

    try:
        return health_pb2.HealthCheckResponse.ServingStatus.Name(asyncio.run(check()))
    except grpc.aio.AioRpcError as error:
        raise HealthError(error.code().name, describe_rpc_error(error, address, timeout_s, dialer)) from error
