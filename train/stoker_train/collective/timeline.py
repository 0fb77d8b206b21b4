"""A timeline of a member's collectives, in Chrome's trace format, as Horovod's.

Each tensor is a row; its calls have the phases QUEUE (behind earlier calls of the group), NEGOTIATE (until
all members have come; ``args`` name the last one) and EXCHANGE. Written by lanes; read in chrome://tracing
or Perfetto, beside ``stoker timeline``.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from stoker.exceptions import BadRequestError

_FLUSH_EVENTS = 1000


class Timeline:
    """A file of one member's phases. For any thread; :meth:`close` makes it complete JSON."""

    def __init__(self, path: str | Path, rank: int, title: str) -> None:
        self.path = Path(str(path).replace("{rank}", str(rank)))
        self._rank = rank
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        try:
            self._file = self.path.open("w")
        except OSError as error:
            raise BadRequestError(
                f"the timeline cannot be written to {str(self.path)!r}\n{error.strerror}",
                field="path",
            ) from None
        self._file.write("[\n")
        self._meta("process_name", 0, f"{title} rank {rank}")

    def record(
        self, row: str, phase: str, begin_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        """Add a phase of ``row``; times are since 1970."""
        with self._lock:
            if self._file.closed:
                return
            event = {
                "name": phase,
                "cat": "collective",
                "ph": "X",
                "ts": begin_ns / 1e3,
                "dur": max(0, end_ns - begin_ns) / 1e3,
                "pid": self._rank,
                "tid": self._row(row),
            }
            self._events.append(event if args is None else {**event, "args": args})
            if len(self._events) >= _FLUSH_EVENTS:
                self._flush()

    def close(self) -> None:
        """Write what is left, and end the file."""
        with self._lock:
            if not self._file.closed:
                self._flush()
                self._file.write("{}]\n")
                self._file.close()

    def _row(self, name: str) -> int:
        number = self._rows.get(name)
        if number is None:
            number = self._rows[name] = len(self._rows) + 1
            self._meta("thread_name", number, name)
        return number

    def _meta(self, kind: str, row: int, name: str) -> None:
        event = {"name": kind, "ph": "M", "pid": self._rank, "tid": row, "args": {"name": name}}
        self._events.append(event)

    def _flush(self) -> None:
        self._file.writelines(json.dumps(event) + ",\n" for event in self._events)
        self._file.flush()
        self._events.clear()
