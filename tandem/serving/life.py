"""The life of a server process: bind, become ready, serve, drain at a signal, exit.

Readiness is told twice: by the standard health service, and by a ready file that holds the bound address (so that
a parent which asked for port 0 learns the port).
"""

import asyncio
import logging
import os
import selectors
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.serving.channels import check_bind_address, parse_address, server_options
from tandem.serving.errors import LifecycleInterceptor
from tandem.serving.health import Health
from tandem.serving.server_tls import ServerTls
from tandem.serving.stalls import STALL_S

_log = logging.getLogger(__name__)

_HEALTH_EVERY_S = 0.5
_LAST_WORDS_S = 1.0  # for the status of calls that are cut off; a client that takes nothing misses it


class PortInUseError(Exception):
    """The address is taken; the message names it."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How a server listens and ends."""

    service_name: str  # of the health service: the proto's full service name
    address: str  # HOST:PORT, port 0 for a free one
    max_message_bytes: int
    insecure: bool = False  # accept a non-loopback address in clear text
    grace_s: float = 5.0  # running calls may take this long to finish when the server stops
    ready_file: Path | None = None
    stall_s: float = STALL_S  # how long a message may wait for a client that takes nothing
    stop_at_eof: bool = False  # stop when standard input ends: a parent that was killed leaves nobody behind
    tls: ServerTls | None = None  # None: clear text
    reflection: bool = False  # tell what can be called to whoever may call
    metrics_address: str | None = None  # HOST:PORT of the page of figures; None: there is none
    ends_process: bool = (
        False  # the process ends with the server: signals to stop it are ignored once it has drained
    )

    def check(self) -> None:
        """AddressError for an address that may not be listened on like this; OSError for an input that never ends."""
        check_bind_address(self.address, insecure=self.insecure, has_tls=self.tls is not None)
        if self.metrics_address is not None:
            check_bind_address(self.metrics_address, insecure=self.insecure, has_tls=self.tls is not None)
        if self.stop_at_eof:
            _check_has_an_end(sys.stdin)


def _bind(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> str:
    """Bind and return HOST:PORT with the real port; PortInUseError when the address is taken."""
    host, _ = parse_address(address)
    try:
        port = (
            server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.credentials())
        )
    except RuntimeError as error:
        raise PortInUseError(f"address {address}: cannot be bound (already in use, or not of this host)") from error
    if port == 0:
        raise PortInUseError(f"address {address}: cannot be bound (already in use, or not of this host)")
    return f"{host}:{port}"


def _write_ready_file(path: Path, address: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(address + "\n")
    os.replace(partial, path)


@contextmanager
def _stopped_by_signals(stopping: asyncio.Event, *, ends_process: bool) -> Iterator[None]:
    """Inside, SIGTERM and SIGINT set the event, as often as they come; afterwards they do what they did before.

    With `ends_process` they are ignored afterwards. A handler of the loop's own would not do: the loop's end makes
    SIGTERM deadly again, and a second one could come before the process has told its exit code.
    """
    loop = asyncio.get_running_loop()

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's
        loop.call_soon_threadsafe(stopping.set)

    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, signal.SIG_IGN if ends_process else handler)


def _check_has_an_end(standard_input: TextIO | None) -> None:
    """OSError, with what to do, for one whose end the loop cannot wait for."""
    try:
        if standard_input is None:
            raise OSError("closed")
        with selectors.DefaultSelector() as selector:
            selector.register(standard_input, selectors.EVENT_READ)
    except (OSError, ValueError) as error:
        raise OSError(
            "--stop-at-eof: standard input is closed, /dev/null or a file, whose end cannot be waited for: give the "
            "service a pipe or a terminal, or leave the option out"
        ) from error


def _stop_at_eof(stopping: asyncio.Event) -> None:
    """Set the event once standard input has ended; what comes before is thrown away."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            stopping.set()

    loop.add_reader(descriptor, read)


async def _tell_health(health: Health, service_name: str, is_healthy: Callable[[], bool]) -> None:
    """Set the state of the process ("") and of the service at once, and whenever it changes."""
    known: bool | None = None
    while True:
        if (now := is_healthy()) != known:
            if known is not None:
                _log.log(
                    logging.INFO if now else logging.ERROR, "%s is %shealthy", service_name, "" if now else "not "
                )
            known = now
            health.set(is_serving=now)
        await asyncio.sleep(_HEALTH_EVERY_S)


async def _stop(server: grpc.aio.Server, lifecycle: LifecycleInterceptor, grace_s: float) -> None:
    """Listen no more; return once every call has ended, or was cut off after the grace."""
    stopped = asyncio.create_task(server.stop(grace_s + _LAST_WORDS_S))
    await asyncio.wait({stopped}, timeout=grace_s)
    if not stopped.done():
        lifecycle.cut_off(
            f"the service is shutting down, and cut off what still ran after the {grace_s:g} s of --grace"
        )
    await stopped


async def run_server(
    settings: ServerSettings,
    register: Callable[[grpc.aio.Server], None],
    *,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    is_healthy: Callable[[], bool] = lambda: True,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    Further signals change nothing: the drain ends by itself.

    Args:
        register: adds the servicers.
        on_drain: awaited after health says NOT_SERVING and before calls are cut off.
        is_healthy: asked again and again; health says NOT_SERVING while it is false.
        interceptors: of every call; what they raise becomes a status.

    Raises:
        AddressError, PortInUseError: before anything is served.
    """
    settings.check()
    if settings.ready_file is not None and not settings.ready_file.parent.is_dir():
        raise FileNotFoundError(
            f"--ready-file {settings.ready_file}: there is no folder {settings.ready_file.parent}"
        )
    lifecycle = LifecycleInterceptor(settings.stall_s)
    server = grpc.aio.server(
        interceptors=[lifecycle, *interceptors],
        options=server_options(settings.max_message_bytes),
    )
    health = Health("", settings.service_name)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    register(server)
    if settings.reflection:
        names = (settings.service_name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    address = _bind(server, settings.address, settings.tls)
    stopping = asyncio.Event()
    with _stopped_by_signals(stopping, ends_process=settings.ends_process):
        if settings.stop_at_eof:
            _stop_at_eof(stopping)
        await server.start()
        watch = asyncio.create_task(_tell_health(health, settings.service_name, is_healthy))
        if settings.ready_file is not None:
            _write_ready_file(settings.ready_file, address)
        _log.info("serving %s on %s", settings.service_name, address)
        try:
            await stopping.wait()
        finally:
            watch.cancel()
            health.drain()
            if on_drain is not None:
                await on_drain()
            health.end()  # nobody who watches keeps the server from ending
            await _stop(server, lifecycle, settings.grace_s)
            _log.info("stopped %s", settings.service_name)
