"""Log lines: what each says of the request it is about, as text and as JSON."""

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest

from tandem.serving.logs import (
    FIELDS,
    JsonFormatter,
    TextFormatter,
    configure_logging,
    logging_about,
    say_cannot_start,
    trace_id_of,
)

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class Lines(logging.Handler):
    """Formatted lines of one logger."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("tests.serving.logs")
    logger.setLevel("DEBUG")
    logger.propagate = False
    yield logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)


def test_a_line_of_json_is_one_object_whatever_is_logged(log: logging.Logger) -> None:
    handler = Lines(JsonFormatter("target"))
    log.addHandler(handler)
    log.warning('several\nlines and "quotes" of %s', "ü\u2028")
    try:
        raise ValueError("of\nmine")
    except ValueError:
        log.exception("failed", extra={"session_id": 7, "status": "INTERNAL"})
    assert all(len(line.splitlines()) == 1 for line in handler.lines)
    first, second = map(json.loads, handler.lines)
    assert first["message"] == 'several\nlines and "quotes" of ü\u2028'
    assert list(first) == ["time", "level", "service", "logger", "message"]
    assert (first["level"], first["service"], first["logger"]) == ("WARNING", "target", "tests.serving.logs")
    assert first["time"].endswith("+00:00")
    assert (second["session_id"], second["status"]) == (7, "INTERNAL")
    assert second["exception"].endswith("ValueError: of\nmine")


def test_a_line_of_text_ends_with_what_it_is_about_on_one_line(log: logging.Logger) -> None:
    handler = Lines(TextFormatter("target"))
    log.addHandler(handler)
    log.info("plain\n%s", "forged\r")
    log.info("refused", extra={"status": "UNAVAILABLE", "request_id": "a\nb"})
    assert handler.lines[0].endswith(" INFO target tests.serving.logs: plain\\nforged\\r")
    assert handler.lines[1].endswith(": refused [request_id='a\\nb' status=UNAVAILABLE]")


def test_a_task_says_once_what_its_lines_and_those_of_its_tasks_are_about(log: logging.Logger) -> None:
    handler = Lines(JsonFormatter("x"))
    log.addHandler(handler)

    async def answer(number: int) -> None:
        logging_about(session_id=number)
        await asyncio.sleep(0)
        log.info("answer")

    async def request(name: str) -> None:
        logging_about(request_id=name, trace_id="")
        await asyncio.gather(answer(1), answer(2))
        log.info("request")

    async def both() -> None:
        await asyncio.gather(request("one"), request("other"))
        log.info("neither")

    asyncio.run(both())
    lines = [json.loads(line) for line in handler.lines]
    about = sorted(
        (line["message"], line.get("request_id", ""), line.get("session_id", 0), line.get("trace_id", ""))
        for line in lines
    )
    assert about == [
        *(("answer", name, number, "") for name in ("one", "other") for number in (1, 2)),
        ("neither", "", 0, ""),
        *(("request", name, 0, "") for name in ("one", "other")),
    ]


def test_lines_are_about_the_documented_fields_only() -> None:
    with pytest.raises(ValueError, match=r"request_id, session_id, .* not colour"):
        logging_about(colour="red")
    assert len(set(FIELDS)) == len(FIELDS)


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (f"00-{TRACE_ID}-00f067aa0ba902b7-01", TRACE_ID),
        (f"cc-{TRACE_ID}-00f067aa0ba902b7-01-more", TRACE_ID),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", ""),
        (f"00-{TRACE_ID.upper()}-00f067aa0ba902b7-01", ""),
        (f"00-{TRACE_ID}-01", ""),
        ("", ""),
    ],
)
def test_only_a_trace_context_has_a_trace_id(traceparent: str, trace_id: str) -> None:
    assert trace_id_of(traceparent) == trace_id


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_service_that_cannot_start_says_so_in_the_form_of_its_log(
    log_format: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    level = root.level
    try:
        configure_logging("target", "INFO", log_format)
        say_cannot_start("target", ValueError("no model"))
    finally:
        root.setLevel(level)
    (line,) = capsys.readouterr().err.splitlines()
    if log_format == "json":
        assert json.loads(line)["message"] == "cannot start: no model"
    else:
        assert line == "target: cannot start: no model"
