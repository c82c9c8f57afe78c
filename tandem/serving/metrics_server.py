"""`--metrics-address`: one page over HTTP, /metrics, answered on the event loop that the figures change on."""

import asyncio
import http.client
import io
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from prometheus_client.exposition import choose_encoder

from tandem.serving.channels import parse_address
from tandem.serving.life import PortInUseError, ServerSettings
from tandem.serving.metrics import Metrics

_log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 16 * 1024
_TIMEOUT_S = 5.0  # for one request, from its first byte to the answer's last


@asynccontextmanager
async def serving_metrics(metrics: Metrics, settings: ServerSettings) -> AsyncIterator[str | None]:
    """Serve inside, in TLS where the service is -> HOST:PORT with the real port; None, and nothing, without an address.

    AddressError for an address that may not be used, PortInUseError for one that is taken.
    """
    settings.check()
    address = settings.metrics_address
    if address is None:
        yield None
        return
    host, port = parse_address(address)
    page, context = _Page(metrics), None if settings.tls is None else settings.tls.context()
    try:
        server = await asyncio.start_server(page.serve, host.strip("[]"), port, limit=_MAX_HEAD_BYTES, ssl=context)
    except OSError as error:
        raise PortInUseError(f"--metrics-address {address}: cannot be bound: {error.strerror or error}") from error
    bound = f"{host}:{server.sockets[0].getsockname()[1]}"
    _log.info("metrics are at %s://%s/metrics", "http" if context is None else "https", bound)
    try:
        yield bound
    finally:
        server.close()
        await page.close()


class _Page:
    """Answers one request a connection."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._running: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its request to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._running[task] = writer
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            pass  # no request that could be answered, or nobody there any more
        finally:
            writer.close()
            del self._running[task]

    async def close(self) -> None:
        """Break off what is being answered."""
        running = dict(self._running)
        for writer in running.values():
            writer.transport.abort()
        await asyncio.gather(*running, return_exceptions=True)

    def _answer(self, head: bytes) -> bytes:
        request, _, fields = head.partition(b"\r\n")
        method, _, rest = request.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"only GET is answered\n")
        if path != "/metrics":
            return _response(HTTPStatus.NOT_FOUND, "text/plain", b"the metrics are at /metrics\n")
        try:
            accept = http.client.parse_headers(io.BytesIO(fields)).get("Accept", "")
        except http.client.HTTPException:
            return _response(HTTPStatus.BAD_REQUEST, "text/plain", b"the header cannot be read\n")
        encode, content_type = choose_encoder(accept)
        return _response(HTTPStatus.OK, content_type, encode(self._metrics.registry), is_head=method == "HEAD")


def _response(status: HTTPStatus, content_type: str, body: bytes, *, is_head: bool = False) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if is_head else body)
