"""How a model service starts: check how it may be called, load, serve; or say in one line why not."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tandem.interrupts import INTERRUPTED
from tandem.serving.channels import MAX_INNER_MESSAGE_BYTES
from tandem.serving.life import PortInUseError, ServerSettings
from tandem.serving.logs import configure_logging, say_cannot_start
from tandem.serving.options import server_settings

LoadedT = TypeVar("LoadedT")


def run_service(
    name: str,
    service_name: str,
    options: argparse.Namespace,
    load: Callable[[argparse.Namespace], LoadedT],
    serve: Callable[[argparse.Namespace, ServerSettings, LoadedT], Coroutine[Any, Any, None]],
    load_errors: tuple[type[Exception], ...],
) -> int:
    """Load, then serve until a signal -> the exit code: 2, after one line on standard error, if it cannot start.

    `service_name`: the proto's. `load` may raise `load_errors`, OSError and ValueError for what the user can mend; the
    rest are bugs.
    """
    mendable: tuple[type[Exception], ...] = (OSError, ValueError, *load_errors)
    configure_logging(name, options.log_level, options.log_format)
    try:
        settings = server_settings(options, service_name, MAX_INNER_MESSAGE_BYTES)
        settings.check()
        loaded = load(options)
    except mendable as error:
        return _cannot_start(name, error)
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted while loading\n")
        os._exit(INTERRUPTED)  # the thread that loads cannot be stopped, and is not worth waiting for
    try:
        asyncio.run(serve(options, settings, loaded))
    except (OSError, PortInUseError) as error:
        return _cannot_start(name, error)
    return 0


def _cannot_start(name: str, error: Exception) -> int:
    say_cannot_start(name, error)
    return 2
