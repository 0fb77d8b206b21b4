"""Logs are JSON lines off a terminal and aligned text on one, whichever module logs."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from stoker_wire.process import log

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    names = ("stoker", "stoker_wire", "stoker_gcs", "stoker_scheduler", "stoker_nodelet")
    loggers = [logging.getLogger(name) for name in (*names, "stoker_kernels", "asyncio")]
    loggers += [logging.getLogger("stoker_migrations"), root]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    yield
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_are_json_with_service_and_level() -> None:
    stream = io.StringIO()
    log.configure("info", stream=stream)
    logger = log.service_logger("gcs")
    logger.debug("hidden")
    logger.info("job finished", extra={"job_id": "job_1", "seconds": 1.5})
    logging.getLogger("stoker_wire.process.background").error("task %s crashed", "x")
    first, second = lines(stream)
    assert [first["event"], second["event"]] == ["job finished", "task x crashed"]
    assert (first["service"], first["job_id"], first["level"]) == ("gcs", "job_1", "info")
    assert first["seconds"] == 1.5
    assert second["logger"] == "stoker_wire.process.background"
    assert "service" not in second and "request_id" not in second
    assert all(line["at"].endswith("Z") for line in (first, second))


def test_modules_of_a_service_carry_its_name_and_the_request() -> None:
    stream = io.StringIO()
    log.configure("info", stream=stream)
    token = log.REQUEST_ID.set("r_1")
    try:
        logging.getLogger("stoker_gcs.registry.nodes").info("node is back")
    finally:
        log.REQUEST_ID.reset(token)
    (line,) = lines(stream)
    assert (line["service"], line["request_id"]) == ("gcs", "r_1")


@pytest.mark.parametrize(
    ("level", "ours", "theirs", "loop"),
    [
        ("debug", True, False, False),
        ("info", False, False, False),
        ("error", False, False, False),
    ],
)
def test_only_our_packages_log_below_info(level: str, ours: bool, theirs: bool, loop: bool) -> None:
    log.configure(level, stream=io.StringIO())
    for name in ("stoker.runtime.x", "stoker_wire.http.x", "stoker_gcs.x", "stoker_scheduler"):
        assert logging.getLogger(name).isEnabledFor(logging.DEBUG) is ours
    assert logging.getLogger("stoker_nodelet.x").isEnabledFor(logging.INFO) is (level != "error")
    assert logging.getLogger("somebody.else").isEnabledFor(logging.DEBUG) is theirs
    assert logging.getLogger("asyncio").isEnabledFor(logging.INFO) is loop


def test_an_exception_is_one_line_with_its_trace() -> None:
    stream = io.StringIO()
    log.configure("info", "json", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError as error:
        log.service_logger("gcs").error("crashed", exc_info=error)
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_text_is_for_people() -> None:
    stream = io.StringIO()
    log.configure("info", "text", stream=stream)
    log.service_logger("gcs").info("listening", extra={"url": "http://x"})
    assert "[info     ] listening" in stream.getvalue()
    assert "[stoker_gcs] url=http://x" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_text_in_colour() -> None:
    stream = Terminal()
    log.configure("info", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        log.service_logger("gcs").exception("crashed")
    first, *trace = stream.getvalue().splitlines()
    assert "\x1b[31m" in first and "crashed" in first
    assert trace[-1] == "ValueError: broken"


def test_what_is_logged_controls_no_terminal_and_no_field_is_a_line() -> None:
    terminal = Terminal()
    log.configure("info", stream=terminal)
    name = "job\x1b]0;owned\x07\x9b2J\rend\n2026 [info] a line"
    logger = log.service_logger("gcs")
    try:
        raise ValueError(name)
    except ValueError:
        logger.exception("%s failed", name, extra={"job": name})
    text = terminal.getvalue()
    assert not any(mark in text for mark in ("\x1b]", "\x07", "\x9b", "\r"))
    assert "\\x1b]0;owned\\x07\\x9b2J\\x0dend" in text
    assert "end\\n2026 [info] a line" in text
