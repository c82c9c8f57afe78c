"""Addresses, channel and server options: one place, so that both ends agree on sizes and keepalive."""

import ipaddress
import re

import grpc

MAX_INNER_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_APPLICATION_MESSAGE_BYTES = 4 * 1024 * 1024

_Options = list[tuple[str, int]]
# How gRPC says that there is no connection, and where in it the cause stands.
_NO_CONNECTION = re.compile(
    r"failed to connect to all addresses; last error: \w+: \S+: (?:Failed to connect to remote host: )?(?P<refused>.+)"
    r"|(?:errors resolving|DNS resolution failed).*?(?:address lookup failed for \S+: (?P<unknown>[^\]]+)|$)",
    re.DOTALL,
)


class AddressError(ValueError):
    """An address that cannot be used; the message says why."""


def parse_address(address: str) -> tuple[str, int]:
    """ "host:port" -> (host, port); AddressError otherwise. Port 0 asks for a free one."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise AddressError(f"address {address!r} is not HOST:PORT with a port in 0..65535")
    return host, int(port)


def check_bind_address(address: str, *, insecure: bool) -> None:
    """Raise AddressError for a non-loopback address in clear text unless that was asked for."""
    host, _ = parse_address(address)
    name = host.strip("[]")
    try:
        is_loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_loopback = name == "localhost"
    if not is_loopback and not insecure:
        raise AddressError(
            f"address {address!r} is not a loopback address and the connection would be in clear text; "
            "pass --insecure to accept that"
        )


def server_options(max_message_bytes: int) -> _Options:
    """Exclusive port, message limit, and keepalive that tolerates what `channel_options` sends."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]


def channel_options(max_message_bytes: int) -> _Options:
    """The client's half; never through an HTTP proxy, and a connection of its own."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def why_not_connected(details: str) -> str | None:
    """The cause in gRPC's words about a connection that could not be made; None when they are about something else."""
    match = _NO_CONNECTION.match(details)
    return (match["refused"] or match["unknown"] or details) if match else None


def open_channel(address: str, max_message_bytes: int = MAX_INNER_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel in clear text to HOST:PORT."""
    parse_address(address)
    return grpc.aio.insecure_channel(address, options=channel_options(max_message_bytes))
