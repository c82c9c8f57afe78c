"""The options every service has: where it listens, how it says that it is ready, how it ends."""

import argparse
from pathlib import Path

from tandem.serving.compute import FREEZE_S
from tandem.serving.life import ServerSettings
from tandem.serving.logs import FORMATS


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
    """Add --address, --insecure, --metrics-address, --ready-file, --grace, --log-level and --log-format."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--address", default=default_address, metavar="HOST:PORT", help="where to listen; port 0: a free one"
    )
    group.add_argument("--insecure", action="store_true", help="accept a non-loopback address in clear text")
    group.add_argument("--ready-file", type=Path, metavar="PATH", help="written with the bound address when ready")
    group.add_argument(
        "--grace", type=seconds, default=5.0, metavar="S", help="seconds for what runs when the service stops"
    )
    group.add_argument("--stop-at-eof", action="store_true", help="stop when standard input ends")
    group.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"], help="least that is logged"
    )
    group.add_argument("--log-format", default="text", choices=FORMATS, help="of the lines on standard error")
    group.add_argument(
        "--metrics-address",
        metavar="HOST:PORT",
        help="where to serve Prometheus metrics, at /metrics, in clear text; port 0: a free one; default: nowhere",
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


def server_settings(options: argparse.Namespace, service_name: str, max_message_bytes: int) -> ServerSettings:
    """What the options say about the server."""
    return ServerSettings(
        service_name,
        options.address,
        max_message_bytes,
        insecure=options.insecure,
        grace_s=options.grace,
        ready_file=options.ready_file,
        stop_at_eof=options.stop_at_eof,
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
