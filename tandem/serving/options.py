"""The options every service has: where and to whom it listens, how it says that it is ready, how it ends."""

import argparse
from pathlib import Path

from tandem.credentials import Credentials
from tandem.serving.compute import FREEZE_S
from tandem.serving.life import ServerSettings
from tandem.serving.logs import FORMATS
from tandem.serving.server_tls import read_server_tls
from tandem.serving.stalls import STALL_S


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Says the default of every option that has one; what leaving out another means is in its own words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = (action.help or "").removesuffix(" (default: %(default)s)")  # some Pythons add it to on/off options
        if isinstance(action.default, bool):
            return f"{text} (default: on)" if action.default else text
        return super()._get_help_string(action) if action.default is not None else text


def make_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """A parser without options yet, whose help says their defaults."""
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=_HelpFormatter)


def add_server_arguments(parser: argparse.ArgumentParser, default_address: str) -> None:
    """Add how to listen, what to tell, how patient to be and how to end."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--address", default=default_address, metavar="HOST:PORT", help="where to listen; port 0: a free one"
    )
    group.add_argument("--insecure", action="store_true", help="accept a non-loopback address in clear text")
    group.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="TLS: the service's certificate, and what links it to its CA (PEM)",
    )
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key (PEM, no passphrase)")
    group.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="mutual TLS: let in only clients with a certificate that one of these authorities has signed (PEM)",
    )
    group.add_argument(
        "--reflection", action="store_true", help="tell clients such as grpcurl what can be called, and how"
    )
    group.add_argument("--ready-file", type=Path, metavar="PATH", help="written with the bound address when ready")
    group.add_argument(
        "--grace", type=seconds, default=5.0, metavar="S", help="seconds for what runs when the service stops"
    )
    group.add_argument(
        "--stall-timeout",
        type=seconds,
        default=STALL_S,
        metavar="S",
        help="a stream whose other end takes nothing of what waits for it for so long is ended",
    )
    group.add_argument(
        "--stop-at-eof", action="store_true", help="stop when standard input, a pipe or a terminal, ends"
    )
    group.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"], help="least that is logged"
    )
    group.add_argument("--log-format", default="text", choices=FORMATS, help="of the lines on standard error")
    group.add_argument(
        "--metrics-address",
        metavar="HOST:PORT",
        help="where to serve Prometheus metrics, at /metrics, in TLS or clear text as the service itself; port 0: a "
        "free one; default: nowhere",
    )


def add_freeze_argument(group: argparse._ActionsContainer) -> None:
    """Add --freeze-timeout."""
    group.add_argument(
        "--freeze-timeout",
        type=seconds,
        default=FREEZE_S,
        metavar="S",
        help="what computes for longer has hung: health says NOT_SERVING, and sessions go elsewhere",
    )


def add_dialing_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of TLS towards the services that this one calls."""
    group = parser.add_argument_group("calls to the target and draft services")
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="call with TLS: authorities, one of which signed their certificates",
    )
    group.add_argument(
        "--tls-client-cert", type=Path, metavar="FILE", help="mutual TLS: the certificate to show them (PEM)"
    )
    group.add_argument(
        "--tls-client-key", type=Path, metavar="FILE", help="the certificate's key (PEM, no passphrase)"
    )
    group.add_argument(
        "--tls-server-name",
        metavar="NAME",
        help="the name in their certificates; default: the host that is called, and HOST where it is dns:HOST:PORT",
    )


def dialing_credentials(options: argparse.Namespace) -> Credentials:
    """What the options of `add_dialing_arguments` say."""
    return Credentials(options.tls_ca, options.tls_client_cert, options.tls_client_key, options.tls_server_name)


def server_settings(options: argparse.Namespace, service_name: str, max_message_bytes: int) -> ServerSettings:
    """What the options say about the server; CredentialsError for TLS files that cannot be used."""
    return ServerSettings(
        service_name,
        options.address,
        max_message_bytes,
        insecure=options.insecure,
        grace_s=options.grace,
        ready_file=options.ready_file,
        stall_s=options.stall_timeout,
        stop_at_eof=options.stop_at_eof,
        tls=read_server_tls(options.tls_cert, options.tls_key, options.tls_client_ca),
        reflection=options.reflection,
        metrics_address=options.metrics_address,
        ends_process=True,
    )


def seconds(text: str) -> float:
    """A time in seconds, above 0 and below a million; ArgumentTypeError otherwise."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds above 0 and below 1e6")
    return value


def positive_int(text: str) -> int:
    """An integer of at least 1; ArgumentTypeError otherwise."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def natural_int(text: str) -> int:
    """An integer of at least 0; ArgumentTypeError otherwise."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)
