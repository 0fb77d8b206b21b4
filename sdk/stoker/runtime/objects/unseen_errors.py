"""Errors of tasks that nobody got: each is told once on stderr, when the last ref to it goes.

All refs that share one failure (the results of a task, and what failed because an argument did) count
as one. It is seen once any of them was read, waited for or asked for by another process. What was
cancelled, and what ends with ``stoker.shutdown()``, is no news to anybody.
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

_TOGETHER_S = 0.1
_APART_S = 10.0
_LINES = 10


class _Error:
    """A failure, how many refs have it, and the first task that it is of."""

    __slots__ = ("failed", "name", "refs", "task_id")

    def __init__(self, failed: Failed, name: str, task_id: str) -> None:
        self.failed = failed
        self.name = name
        self.task_id = task_id
        self.refs = 0


class UnseenErrors:
    """The errors of this process's tasks that nobody has seen yet."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, wanted: bool) -> None:
        self._loop = loop
        self._is_wanted = wanted
        self.expected: Failed | None = None
        """The failure of all that waits for a cluster that is gone: its driver says so itself."""
        self._errors: dict[int, _Error] = {}
        """By the identity of the failure, which each error holds."""
        self.asked: set[int] = set()
        """Identities of unsettled entries whose error will have been asked for."""
        self._is_over = False
        self._is_telling = False
        self._pause_s = _TOGETHER_S
        self._told_at_s = -math.inf

    def settles(self, entry: Entry, location: Location) -> None:
        """An entry of a task of this process gets its location (loop thread)."""
        asked = id(entry) in self.asked
        self.asked.discard(id(entry))
        task = entry.task
        if not isinstance(location, Failed) or task is None:
            return
        if location.code == TaskCancelledError.code or location is self.expected or self._is_over:
            return
        if asked or entry._subscribers or not self._is_wanted:
            self.seen(location)
            return
        error = self._errors.get(id(location))
        if error is None:
            error = self._errors[id(location)] = _Error(location, task.name, task.task_id)
        error.refs += 1

    def seen(self, location: Location | None) -> None:
        """Somebody has this error (any thread)."""
        self._errors.pop(id(location), None)

    def asked_for(self, entries: Iterable[Entry]) -> None:
        """Somebody wanted all of these, and had the error of one of them (any thread)."""
        for entry in entries:
            if entry.location is None and entry.task is not None:
                self.asked.add(id(entry))
            elif isinstance(entry.location, Failed):
                self.seen(entry.location)

    def freed(self, location: Location | None) -> None:
        """The last ref to an object went (loop thread)."""
        error = self._errors.get(id(location))
        if error is None:
            return
        error.refs -= 1
        if error.refs <= 0 and not self._is_telling:
            self._is_telling = True
            # Many errors over a long time end in few lines.
            recent = self._loop.time() - self._told_at_s < 2 * _APART_S
            self._pause_s = min(_APART_S, self._pause_s * 4) if recent else _TOGETHER_S
            self._loop.call_later(self._pause_s, self._tell)

    def job_ends(self) -> None:
        """What fails from here on fails because the job ends (any thread)."""
        self._is_over = True

    def close(self) -> None:
        """The refs go with the process: tell what is left (loop thread)."""
        lost, self._errors = list(self._errors.values()), {}
        write_now(_lines(lost))

    def _tell(self) -> None:
        self._is_telling = False
        lost = [error for error in list(self._errors.values()) if error.refs <= 0]
        for error in lost:
            self.seen(error.failed)
        if lost:
            self._told_at_s = self._loop.time()
            write_soon(_lines(lost))


def _lines(lost: list[_Error]) -> str:
    """Return a line per kind of error, for so many kinds."""
    alike: dict[tuple[str, str], list[str]] = {}
    for error in lost:
        alike.setdefault((error.name, _text_of(error.failed)), []).append(error.task_id)
    lines = [
        f"stoker: task {name} ({_ids(task_ids)}) failed, and nobody got the error: {text} "
        "(get() or wait() for its ref; to hear nothing of such: STOKER_LOG_UNSEEN_ERRORS=0)\n"
        for (name, text), task_ids in list(alike.items())[:_LINES]
    ]
    if len(alike) > _LINES:
        lines.append(f"stoker: {len(alike) - _LINES} other errors were got by nobody either\n")
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
