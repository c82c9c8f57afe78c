"""Addresses, channel and server options: one place, so that both ends agree on sizes and keepalive."""

import ipaddress
import re

import grpc

MAX_INNER_MESSAGE_BYTES = 32 * 1024 * 1024
MAX_UNTRUSTED_MESSAGE_BYTES = (
    1024 * 1024 + 64 * 1024
)  # a full batch without probabilities; its bytes alone take time
MAX_APPLICATION_MESSAGE_BYTES = 4 * 1024 * 1024

_Options = list[tuple[str, int]]
_ChannelOptions = list[tuple[str, int | str]]
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


def is_loopback(address: str) -> bool:
    """Whether what is said to HOST:PORT stays on this machine; AddressError for what is not HOST:PORT."""
    host, _ = parse_address(address)
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def check_bind_address(address: str, *, insecure: bool, has_tls: bool = False) -> None:
    """Raise AddressError for a non-loopback address in clear text unless that, and not TLS, was asked for."""
    is_private = is_loopback(address)
    if insecure and has_tls:
        raise AddressError("--insecure accepts clear text and --tls-cert ends it; leave one of them out")
    if not (is_private or insecure or has_tls):
        raise AddressError(
            f"address {address!r} is not a loopback address and the connection would be in clear text; "
            "use TLS (--tls-cert FILE --tls-key FILE), or pass --insecure to accept that"
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


def channel_options(
    max_message_bytes: int, server_name: str | None = None, max_received_bytes: int | None = None
) -> _ChannelOptions:
    """The client's half; never through an HTTP proxy, and a connection of its own.

    `server_name`: in the server's certificate; None: the host that is called. `max_received_bytes`: where messages from
    there must be smaller than those to there.
    """
    options: _ChannelOptions = [
        ("grpc.max_receive_message_length", max_received_bytes or max_message_bytes),
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
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options


def why_not_connected(details: str) -> str | None:
    """The cause in gRPC's words about a connection that could not be made; None when they are about something else."""
    match = _NO_CONNECTION.match(details)
    return (match["refused"] or match["unknown"] or details) if match else None


def open_channel(
    address: str,
    max_message_bytes: int = MAX_INNER_MESSAGE_BYTES,
    tls: grpc.ChannelCredentials | None = None,
    server_name: str | None = None,
    max_received_bytes: int | None = None,
) -> grpc.aio.Channel:
    """A channel to HOST:PORT on the running event loop; in clear text without `tls`."""
    parse_address(address)
    options = channel_options(max_message_bytes, server_name, max_received_bytes)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls, options=options)


def open_blocking_channel(
    address: str,
    max_message_bytes: int,
    tls: grpc.ChannelCredentials | None = None,
    server_name: str | None = None,
) -> grpc.Channel:
    """`open_channel`, for threads."""
    parse_address(address)
    options = channel_options(max_message_bytes, server_name)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls, options=options)
