"""The network between an orchestrator and one replica, as a TCP relay that can be cut or swallow what it is given."""

import asyncio
import contextlib

_CHUNK = 1 << 16


class Cable:
    """Listens on a port of its own and passes bytes on to the replica, wherever that is now."""

    def __init__(self) -> None:
        self.far_end: str | None = None  # the replica's HOST:PORT; None: nobody is there
        self.address = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()

    @property
    def is_swallowing(self) -> bool:
        """Whether nothing is passed on."""
        return not self._flows.is_set()

    async def lay(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """End every connection; new ones can be made."""
        for writer in self._writers:
            writer.transport.abort()

    async def swallow(self, seconds: float) -> None:
        """Pass nothing on for so long; connections stay, and what was sent comes late."""
        self._flows.clear()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._flows.set()

    async def take_up(self) -> None:
        """Stop."""
        if self._server is not None:
            self._server.close()
        self._flows.set()
        self.cut()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(writer.transport.abort)
            if self.far_end is None:
                return
            host, _, port = self.far_end.rpartition(":")
            try:
                far_reader, far_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                return
            stack.callback(far_writer.transport.abort)
            ends = {writer, far_writer}
            self._writers |= ends
            stack.callback(self._writers.difference_update, ends)
            ways = [
                asyncio.create_task(self._pass(reader, far_writer)),
                asyncio.create_task(self._pass(far_reader, writer)),
            ]
            stack.callback(lambda: [way.cancel() for way in ways])
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
