"""Where a kind of replica is found: named addresses, a host name's, or a file's, looked up again and again."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from tandem.serving.channels import AddressError, parse_address

Find = Callable[[], Awaitable[tuple[str, ...]]]  # the addresses of now; OSError or AddressError when it cannot say

_DNS, _FILE = "dns:", "file:"


def find_addresses(text: str) -> Find:
    """What `--target` and `--draft` say; AddressError for what cannot be used.

    HOST:PORT,... stays as it is; dns:HOST:PORT is every address that HOST has; file:PATH has an address a line.
    """
    if text.startswith(_DNS):
        host, port = parse_address(text.removeprefix(_DNS))
        _check_name(host)
        return lambda: _addresses_of(host, port)
    if text.startswith(_FILE):
        path = Path(text.removeprefix(_FILE))
        return lambda: asyncio.to_thread(_read, path)
    addresses = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for address in addresses:
        parse_address(address)
    return lambda: _named(addresses)


def shared_host(text: str) -> str | None:
    """HOST of dns:HOST:PORT, which all replicas found there share; None where each is named by itself."""
    return parse_address(text.removeprefix(_DNS))[0].strip("[]") if text.startswith(_DNS) else None


def _check_name(host: str) -> None:
    """AddressError for what cannot even be asked for."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise AddressError(f"{_DNS}{host}: is no host name: {error}") from error


async def _named(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return addresses


async def _addresses_of(host: str, port: int) -> tuple[str, ...]:
    """Of a headless service or a scaled container: one address a replica."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    numbers = sorted({str(entry[4][0]) for entry in found})
    return tuple(f"[{number}]:{port}" if ":" in number else f"{number}:{port}" for number in numbers)


def _read(path: Path) -> tuple[str, ...]:
    """Empty lines and those that begin with # say nothing."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would keep whoever reads it, for ever
        raise AddressError(f"{path}: is not a regular file, such as can be read again")
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError as error:
        raise AddressError(f"{path}: is not UTF-8 text") from error
    addresses = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    for address in addresses:
        try:
            parse_address(address)
        except AddressError as error:
            raise AddressError(f"{path}: {error}") from error
    return addresses
