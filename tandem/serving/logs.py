"""Logs: one event a line, as text or as JSON, and what each is about: the request, the session, the caller's trace.

Code that handles a request says so once, with `logging_about`; every line logged on its behalf then carries it.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType

FORMATS = ("text", "json")
# What a line may be about, in this order; `extra=` of a logging call may say it as well.
FIELDS = ("request_id", "session_id", "trace_id", "caller", "method", "status")

# Later versions may have more behind it; not at any length, for every item of a request carries it.
_TRACEPARENT = re.compile(
    r"[0-9a-f]{2}-(?P<trace_id>(?!0{32})[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{0,200})?"
)
_about: ContextVar[Mapping[str, str | int]] = ContextVar("_about", default=MappingProxyType({}))


def logging_about(**about: str | int) -> None:
    """Lines logged from now on in this task, and in those it starts, are about these FIELDS too; empty ones are not."""
    unknown = about.keys() - set(FIELDS)
    if unknown:
        raise ValueError(f"lines are about {', '.join(FIELDS)}, not {', '.join(unknown)}")
    _about.set({**_about.get(), **{name: value for name, value in about.items() if value != ""}})


def trace_id_of(traceparent: str) -> str:
    """The trace id of a W3C trace context; "" for what is none."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match["trace_id"] if match else ""


def configure_logging(service: str, level: str = "INFO", log_format: str = "text") -> None:
    """Logs go to standard error, one line an event, named by service."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter(service))
    logging.basicConfig(level=level, handlers=[handler])


def say_cannot_start(service: str, error: Exception) -> None:
    """The one line of a service that ends before it serves: plain text, or JSON where logs are."""
    handlers = logging.getLogger().handlers
    if any(isinstance(handler.formatter, JsonFormatter) for handler in handlers):
        logging.getLogger(service).error("cannot start: %s", error)
    else:
        sys.stderr.write(f"{service}: cannot start: {error}\n")


class TextFormatter(logging.Formatter):
    """What happened, then in brackets what it is about."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s%(about)s")

    def format(self, record: logging.LogRecord) -> str:
        about = " ".join(
            f"{name}={value!r}" if name == "request_id" else f"{name}={value}"
            for name, value in _about_of(record).items()
        )
        record.about = f" [{about}]" if about else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """On one line: what is logged may quote what a client sent."""
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


class JsonFormatter(logging.Formatter):
    """One object: time (UTC), level, service, logger, message, FIELDS that apply, and an exception's traceback."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_about_of(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


def _about_of(record: logging.LogRecord) -> dict[str, str | int]:
    """Where both say something, what the call itself said."""
    said = {**_about.get(), **{name: getattr(record, name) for name in FIELDS if hasattr(record, name)}}
    return {name: said[name] for name in FIELDS if name in said}
