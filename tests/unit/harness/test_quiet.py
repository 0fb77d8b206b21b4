"""The check for quiet logs sees what is loud, once, and lets pass what is allowed or explained by load."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from stoker_wire.process.log import service_logger
from tests.quiet import Quiet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[Quiet]:
    made = Quiet(tmp_path)
    made.begin()
    (tmp_path / "s" / "logs").mkdir(parents=True)
    yield made
    made.end()


def say(folder: Path, name: str, *lines: str) -> None:
    with (folder / "s" / "logs" / name).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def line(level: str, event: str) -> str:
    return json.dumps({"event": event, "level": level})


def test_warnings_errors_and_tracebacks_are_loud_and_told_once(
    quiet: Quiet, tmp_path: Path
) -> None:
    say(tmp_path, "head.log", line("info", "ready"), line("warning", "odd"), line("error", "bad"))
    say(tmp_path, "forkserver.log", "hello", "Traceback (most recent call last):", "  File ...")
    found = quiet.unexpected()
    assert [text.partition(": ")[0] for text in found] == [
        "logs/forkserver.log",
        "logs/head.log",
        "logs/head.log",
    ]
    assert quiet.unexpected() == []
    say(tmp_path, "head.log", line("critical", "worse"))
    assert len(quiet.unexpected()) == 1


def test_users_output_and_what_is_allowed_pass(quiet: Quiet, tmp_path: Path) -> None:
    say(tmp_path, "worker-w_1.log", "Traceback (most recent call last):")
    say(tmp_path, "job-job_1.log", line("error", "mine"))
    say(tmp_path, "head.log", line("warning", "the sweep was held up for 3.0 s"))
    quiet.allow([r"Redis does not answer"])
    say(tmp_path, "head.log", line("warning", "Redis does not answer (gone)"), line("error", "x"))
    (found,) = quiet.unexpected()
    assert '"x"' in found


def test_databases_and_this_process_are_heard_too(quiet: Quiet, tmp_path: Path) -> None:
    log = tmp_path / "stoker-pg-1" / "server.log"
    log.parent.mkdir()
    log.write_text("UTC [1] LOG:  ready\nUTC [2] ERROR:  duplicate key\n")
    logging.getLogger("asyncio").error("Task exception was never retrieved")
    logging.getLogger("somebody.else").error("not ours")
    service_logger("scheduler").warning("lease did not start on %s", "b")
    own, service, database = quiet.unexpected(log)
    assert own == "this process: asyncio: Task exception was never retrieved"
    assert service == "this process: stoker_scheduler: lease did not start on b"
    assert "duplicate key" in database


def test_what_a_shared_server_said_before_a_module_is_not_the_module_s(
    quiet: Quiet, tmp_path: Path
) -> None:
    log = tmp_path / "stoker-pg-1" / "server.log"
    log.parent.mkdir()
    log.write_text("2026 UTC [1] FATAL:  for another\n")
    quiet.join(log)
    assert quiet.unexpected(log) == []
    with log.open("a") as file:
        file.write("2026 UTC [1] FATAL:  for this one\n")
    quiet.join(log)  # of the module's next test
    (found,) = quiet.unexpected(log)
    assert "for this one" in found


def test_a_test_that_is_over_is_not_read_again(quiet: Quiet, tmp_path: Path) -> None:
    quiet.finish(tmp_path / "s")
    say(tmp_path, "head.log", line("error", "late"))
    assert quiet.unexpected() == []
