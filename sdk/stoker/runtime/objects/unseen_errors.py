"""Errors of tasks that nobody got: each is reported once on stderr, when the last ref to it goes.

All refs that share one failure (the results of a task, and what failed because an argument did) count
as one. It is seen once any of them was read, waited for or asked for by another process. Cancellations,
and errors that come with ``stoker.shutdown()``, are not reported.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stoker.exceptions import TaskCancelledError, TaskError
from stoker.runtime.process.stderr import write_now, write_soon
from stoker_wire.messages.data import Failed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from stoker.runtime.objects.table import Entry
    from stoker_wire.messages.data import Location

_BATCH_S = 0.1
_MAX_PAUSE_S = 10.0
_LINES = 10


class _Error:
    """A failure, the number of objects that have it, and the first task that it is of."""

    __slots__ = ("failed", "name", "refs", "task_id")

    def __init__(self, failed: Failed, name: str, task_id: str) -> None:
        self.failed = failed
        self.name = name
        self.task_id = task_id
        self.refs = 0


class UnseenErrors:
    """The errors of this process's tasks that nobody has seen yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, enabled: bool) -> None:
        self._loop = loop
        self._enabled = enabled
        self.expected: Failed | None = None
        """The failure of all that waits for a cluster that is gone: its driver says so itself."""
        self._errors: dict[int, _Error] = {}
        """By the identity of the failure, which each error holds."""
        self.requested: set[int] = set()
        """Identities of unsettled entries that somebody waited for: an error of theirs counts as seen."""
        self._job_ended = False
        self._report_scheduled = False
        self._pause_s = _BATCH_S
        self._reported_at_s = -math.inf

    def on_settle(self, entry: Entry, location: Location) -> None:
        """Note the error that an entry of a task of this process is settled with (loop thread)."""
        was_requested = id(entry) in self.requested
        self.requested.discard(id(entry))
        task = entry.task
        if not isinstance(location, Failed) or task is None:
            return
        if location.code == TaskCancelledError.code or location is self.expected or self._job_ended:
            return
        if was_requested or entry._subscribers or not self._enabled:
            self.mark_seen(location)
            return
        error = self._errors.get(id(location))
        if error is None:
            error = self._errors[id(location)] = _Error(location, task.name, task.task_id)
        error.refs += 1

    def mark_seen(self, location: Location | None) -> None:
        """Note that somebody got this error (any thread)."""
        self._errors.pop(id(location), None)

    def mark_requested(self, entries: Iterable[Entry]) -> None:
        """Note that somebody waited for all of these, and perhaps got the error of one (any thread)."""
        for entry in entries:
            if entry.location is None and entry.task is not None:
                self.requested.add(id(entry))
            elif isinstance(entry.location, Failed):
                self.mark_seen(entry.location)

    def on_free(self, location: Location | None) -> None:
        """Schedule a report if the last ref to an unseen error went (loop thread)."""
        error = self._errors.get(id(location))
        if error is None:
            return
        error.refs -= 1
        if error.refs <= 0 and not self._report_scheduled:
            self._report_scheduled = True
            # So that many errors over a long time make few lines.
            recent = self._loop.time() - self._reported_at_s < 2 * _MAX_PAUSE_S
            self._pause_s = min(_MAX_PAUSE_S, self._pause_s * 4) if recent else _BATCH_S
            self._loop.call_later(self._pause_s, self._report)

    def on_job_end(self) -> None:
        """Note that what fails from here on fails because the job ends (any thread)."""
        self._job_ended = True

    def close(self) -> None:
        """Report what is left: the refs go with the process (loop thread)."""
        unseen, self._errors = list(self._errors.values()), {}
        write_now(_lines(unseen))

    def _report(self) -> None:
        self._report_scheduled = False
        unseen = [error for error in list(self._errors.values()) if error.refs <= 0]
        for error in unseen:
            self.mark_seen(error.failed)
        if unseen:
            self._reported_at_s = self._loop.time()
            write_soon(_lines(unseen))


def _lines(unseen: list[_Error]) -> str:
    """Return a line for each of the first ``_LINES`` kinds of errors."""
    by_kind: dict[tuple[str, str], list[str]] = {}
    for error in unseen:
        by_kind.setdefault((error.name, _text_of(error.failed)), []).append(error.task_id)
    lines = [
        f"stoker: task {name} ({_ids(task_ids)}) failed, and nobody got the error: {text} "
        "(get() or wait() for its ref; to hear nothing of such: STOKER_LOG_UNSEEN_ERRORS=0)\n"
        for (name, text), task_ids in list(by_kind.items())[:_LINES]
    ]
    if len(by_kind) > _LINES:
        lines.append(f"stoker: {len(by_kind) - _LINES} other errors were got by nobody either\n")
    return "".join(lines)


def _ids(task_ids: list[str]) -> str:
    more = len(task_ids) - 1
    return task_ids[0] + (f" and {more} more" if more else "")


def _text_of(failed: Failed) -> str:
    lines = failed.message.strip().splitlines()
    kind = failed.type_name.removeprefix("builtins.").rpartition("exceptions.")[2]
    # The second line of an error of ours is its cause; of a user's, it may be anything.
    shown = lines[: 1 if failed.code == TaskError.code else 2]
    text = "; ".join(line for line in shown if not line.startswith(" "))
    return ": ".join(part for part in (kind, text) if part)
