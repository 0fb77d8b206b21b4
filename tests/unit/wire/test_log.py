"""Logs are JSON lines off a terminal, and the standard logging comes out the same way."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING

import pytest
import structlog

from stoker_wire.process import log

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def test_lines_are_json_with_service_and_level() -> None:
    stream = io.StringIO()
    log.configure("info", stream=stream)
    logger = log.get_logger("gcs")
    logger.debug("hidden")
    logger.info("job finished", job_id="job_1", seconds=1.5)
    logging.getLogger("stoker.background").error("task %s crashed", "x")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["job finished", "task x crashed"]
    assert (lines[0]["service"], lines[0]["job_id"], lines[0]["level"]) == ("gcs", "job_1", "info")
    assert lines[1]["logger"] == "stoker.background"
    assert all(line["at"].endswith("Z") for line in lines)


def test_an_exception_is_one_line_with_its_trace() -> None:
    stream = io.StringIO()
    log.configure("info", "json", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError as error:
        log.get_logger("gcs").error("crashed", exc_info=error)
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_text_is_for_people() -> None:
    stream = io.StringIO()
    log.configure("info", "text", stream=stream)
    log.get_logger("gcs").info("listening", url="http://x")
    assert "listening" in stream.getvalue()
    assert "url=http://x" in stream.getvalue()
