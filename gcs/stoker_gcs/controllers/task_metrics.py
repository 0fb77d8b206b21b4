"""Metrics of tasks by function: counted from the task history as it is stored, never where tasks run.

A row is at least once in what is stored: an end that was counted a moment ago is not counted again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from stoker_wire.data.spool import INFERRED_RANK, record_of
from stoker_wire.messages.work import TaskState
from stoker_wire.process.metrics import SPAN_BOUNDS, BoundedLabel, Distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stoker_wire.data.spool import TaskRow
    from stoker_wire.process.metrics import Metrics

_REMEMBERED = 20_000
"""Ends that are not counted a second time, at least."""
_MAX_CODES = 100


class _Times(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The first members of :class:`stoker_wire.data.spool.TaskFacts`: of most rows only they are decoded."""

    parent_task_id: str = ""
    submitted_at_s: float | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None


_times = msgspec.msgpack.Decoder(_Times).decode


class _Function:
    """The attempts of one function."""

    __slots__ = ("ended", "run_s", "wait_s")

    def __init__(self) -> None:
        self.ended: dict[str, int] = {}
        self.run_s = Distribution(SPAN_BOUNDS)
        self.wait_s = Distribution(SPAN_BOUNDS)

    def add(self, state: str, packed: bytes) -> None:
        """Count an end, with its times if they can be read."""
        self.ended[state] = self.ended.get(state, 0) + 1
        try:
            times = _times(packed)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return  # it is damaged, or of the first version
        started_s, ended_s = times.started_at_s, times.ended_at_s
        submitted_s = times.submitted_at_s
        if started_s is not None:  # clocks of two machines may differ: no time is negative
            if ended_s is not None:
                self.run_s.observe(ended_s - started_s if ended_s > started_s else 0.0)
            if submitted_s is not None:
                self.wait_s.observe(started_s - submitted_s if started_s > submitted_s else 0.0)


class TaskMetrics:
    """Counts of attempts that ended, of at most ``max_functions`` functions each for itself."""

    def __init__(self, metrics: Metrics, max_functions: int) -> None:
        self._functions: dict[str, _Function] = {}
        self._label = BoundedLabel(max_functions, lambda name: self._functions.pop(name, None))
        self._codes: Counter[str] = Counter()
        self._code = BoundedLabel(_MAX_CODES, lambda code: self._codes.pop(code, None))
        self._recent: set[int] = set()
        self._former: set[int] = set()
        """Hashes of the attempts that were counted last, and before those."""
        metrics.show("stoker_tasks_ended_total", self._ended)
        metrics.show("stoker_task_failures_total", lambda: self._codes)
        metrics.show("stoker_task_run_seconds", lambda: self._spans("run_s"))
        metrics.show("stoker_task_wait_seconds", lambda: self._spans("wait_s"))

    def count(self, rows: Sequence[TaskRow]) -> None:
        """Count those of some rows that tell of an end."""
        recent, former = self._recent, self._former
        functions: dict[str, _Function] = {}
        for row in rows:
            if row[7] < INFERRED_RANK:
                continue
            attempt = hash((row[0], row[1]))
            if attempt in recent or attempt in former:
                continue
            recent.add(attempt)
            name = row[4]
            function = functions.get(name) or functions.setdefault(name, self._function(name))
            function.add(row[3], row[8])
            if row[3] == TaskState.FAILED.value:
                error = record_of(row).error
                self._codes[self._code.of(error.code if error else "")] += 1
        if len(recent) > _REMEMBERED:
            self._recent, self._former = set(), recent

    def _function(self, name: str) -> _Function:
        label = self._label.of(name)
        function = self._functions.get(label)
        if function is None:
            function = self._functions[label] = _Function()
        return function

    def _ended(self) -> dict[tuple[str, ...], int]:
        return {
            (name, state): count
            for name, function in self._functions.items()
            for state, count in function.ended.items()
        }

    def _spans(self, which: str) -> dict[str, Distribution]:
        return {name: getattr(one, which) for name, one in self._functions.items()}
