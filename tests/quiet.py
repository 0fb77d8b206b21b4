"""A quiet log is a feature: what services log as a warning or an error fails the test that saw it.

Reads the log files of all services that a test started, incrementally: whatever lies below the run's
temporary folders and is neither a worker's nor a job's output, and PostgreSQL's own log. Only
conftest.py calls. A test that breaks something says what it expects to be logged:
``@pytest.mark.logs(r"heartbeat: cannot reach")``, as regular expressions.
"""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LOUD = {"warning", "error", "critical"}
OUTPUT = ("worker-", "job-")
"""How the logs of users' code are named: those may say what they like."""
CRASHES = re.compile(
    r"Traceback \(most recent call last\)|never retrieved|was never awaited|^Fatal "
)
POSTGRES = re.compile(r" (ERROR|FATAL|PANIC|WARNING): ")
LOAD = (
    r"the sweep was held up for",
    r"passed its deadline",
    r"was silent for",
    r"owners did not answer within",
    r"did not end [\d.]+ s after its cancel",
    r"leadership lost",
    r'"event": "cut off"',
    # asyncpg's, where a connection is given up while it asks the server for TLS.
    r"unexpected connection_lost\(\) call",
    # PostgreSQL takes its locks back from a replica that stood still within a transaction.
    r"terminating connection due to idle-in-transaction timeout",
    r"terminating connection due to administrator command",
)
"""What a healthy service says on a machine that is too busy to run it."""


class Quiet:
    """Finds what is new in the logs of this run and should not be there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: set[Path] = set()
        self._joined: set[Path] = set()
        self._read: dict[Path, int] = {}
        self._records = _Records()
        self._allowed: list[str] = []

    def begin(self) -> None:
        """Start with a module: folders that are there are nobody's any more."""
        self._done = set(self._folder.iterdir())
        self._joined = set()
        self._allowed = []
        self._records.taken()
        root = logging.getLogger()
        if self._records not in root.handlers:
            root.addHandler(self._records)

    def join(self, log: Path) -> None:
        """Take what a server that is older than this module has logged for others' doing."""
        log = Path(os.path.realpath(log))
        if log not in self._joined and log.exists():
            self._joined.add(log)
            self._read[log] = log.stat().st_size

    def end(self) -> None:
        """Hear this process no more."""
        logging.getLogger().removeHandler(self._records)

    def allow(self, patterns: Iterable[str]) -> None:
        """Take lines that match for expected until the module ends: they may come late."""
        self._allowed += patterns

    def finish(self, folder: Path) -> None:
        """Look no more into the folder of a test that has ended."""
        self._done.add(folder)

    def unexpected(self, *others: Path) -> list[str]:
        """Return the loud lines since the last call that nobody allows; ``others`` are read too."""
        expected = [re.compile(pattern) for pattern in (*self._allowed, *LOAD)]
        return [
            line
            for line in (*self._records.taken(), *self._new_lines(others))
            if not any(pattern.search(line) for pattern in expected)
        ]

    def _new_lines(self, others: Iterable[Path]) -> Iterator[str]:
        files = list(others)
        for folder in set(self._folder.iterdir()) - self._done:
            if folder.is_symlink():
                continue
            files += folder.rglob("*.log")
        for path in sorted({Path(os.path.realpath(file)) for file in files}):
            if path.name.startswith(OUTPUT):
                continue
            for line in self._tail(path):
                if is_loud(line, path):
                    yield f"{path.parent.name}/{path.name}: {line}"

    def _tail(self, path: Path) -> list[str]:
        at = self._read.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(at)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = at + len(whole)
        return whole.decode(errors="replace").splitlines()


class _Records(logging.Handler):
    """Keeps what this process itself logs: drivers, and services that run in it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        self.setFormatter(logging.Formatter("this process: %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(("stoker", "asyncio")):
            self._lines.append(self.format(record))

    def taken(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


def is_loud(line: str, path: Path) -> bool:
    """Whether a line of this log says that something is wrong."""
    if path.parent.name.startswith("stoker-pg-"):
        return bool(POSTGRES.search(line))
    if line.startswith("{"):
        try:
            said: Any = json.loads(line)
        except ValueError:
            return True
        return isinstance(said, dict) and said.get("level") in LOUD
    return bool(CRASHES.search(line))
