"""Where replicas are found: named, by DNS, in a file; what cannot be an address is refused by name."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.addresses import find_addresses
from tandem.serving.channels import AddressError


def found(text: str) -> tuple[str, ...]:
    return asyncio.run(find_addresses(text)())  # type: ignore[arg-type]


def test_named_addresses_are_each_taken_once() -> None:
    assert found("a:1, b:2,a:1") == ("a:1", "b:2")


@pytest.mark.parametrize("text", ["", "a", "a:1,", "a:1,b", "dns:a", "dns:a..b:1", "a:70000"])
def test_what_is_no_address_is_refused_at_once(text: str) -> None:
    with pytest.raises(AddressError):
        find_addresses(text)


def test_a_file_is_read_again_each_time(tmp_path: Path) -> None:
    path = tmp_path / "targets"
    find = find_addresses(f"file:{path}")
    with pytest.raises(FileNotFoundError):
        asyncio.run(find())  # type: ignore[arg-type]
    path.write_text("# two\na:1\n\n b:2 \na:1\n")
    assert asyncio.run(find()) == ("a:1", "b:2")  # type: ignore[arg-type]
    path.write_text("")
    assert asyncio.run(find()) == ()  # type: ignore[arg-type]
    path.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(AddressError, match=f"{path}: is not UTF-8 text"):
        asyncio.run(find())  # type: ignore[arg-type]
    path.write_text("a:1\nb\n")
    with pytest.raises(AddressError, match=f"{path}: address 'b'"):
        asyncio.run(find())  # type: ignore[arg-type]


def test_a_pipe_in_the_file_s_place_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "targets")
    with pytest.raises(AddressError, match="is not a regular file"):
        found(f"file:{tmp_path / 'targets'}")


def test_a_host_name_gives_every_address_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> tuple[str, ...]:
        async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
            assert (host, port) == ("targets", 50051)
            return [(2, 1, 6, "", (number, port)) for number in ("10.0.0.2", "10.0.0.1", "10.0.0.2")] + [
                (10, 1, 6, "", ("fd00::1", port, 0, 0))
            ]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        return await find_addresses("dns:targets:50051")()

    assert asyncio.run(scenario()) == ("10.0.0.1:50051", "10.0.0.2:50051", "[fd00::1]:50051")
