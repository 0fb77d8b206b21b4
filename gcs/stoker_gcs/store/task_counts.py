"""Counts of attempts by function, state and error, histograms of their times, and what they held: pure.

They are written in the transaction that writes the attempts, as what these change in them, so they are
exact at any size of the history and cost a few rows for each batch. An attempt that was stored before
is taken out as it was and put in as it is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from math import log2
from typing import TYPE_CHECKING, NamedTuple

from stoker_gcs.store.rows import times_in
from stoker_gcs.store.task_merge import merge_rows
from stoker_wire.data.spool import INFERRED_RANK, held_in, record_of
from stoker_wire.messages.work import TaskState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stoker_wire.data.spool import TaskRow

MAX_NAMES = 1000
"""Functions of a job that are counted by themselves; a program may name each of its calls."""
OTHERS = "(others)"
"""The name under which all further functions of a job are counted."""
RUN, WAIT = "run", "wait"
CPU, GPU, GROUP_CPU, GROUP_GPU = "cpu", "gpu", "group_cpu", "group_gpu"
"""Measures of what was held: the sums are seconds times CPUs or GPUs, all in the first bucket; the last two
are what of the first two was of placement groups."""
_PER_OCTAVE = 4
_UNIT_S = 1e-6
_NOTHING = (0, 0.0)
_WITH_ERROR = frozenset({TaskState.FAILED.value, TaskState.CANCELLED.value})

StoredTask = tuple[
    str, int, str, str, str, str, str, int, bytes, float | None, float | None, float | None, str
]
"""A row of the table ``tasks``: a TaskRow, its times, and its worker."""


class Changed(NamedTuple):
    """An attempt that was written: the row that was there before, if any, and the one that is there now."""

    before: StoredTask | None
    now: StoredTask


class Deltas(NamedTuple):
    """The changes of rows of ``task_counts`` and ``task_durations``, each in the order of its key."""

    counts: list[tuple[str, str, str, str, int]]
    durations: list[tuple[str, str, str, int, int, float]]


def stored(row: TaskRow) -> StoredTask:
    """Return a row as it is stored."""
    times = times_in(row[8])
    return (*row, times.submitted_at_s, times.started_at_s, times.ended_at_s, times.worker_id)


def merged_with(
    known: Mapping[tuple[str, int], TaskRow], new: Mapping[tuple[str, int], TaskRow]
) -> list[Changed]:
    """Return what becomes of reported attempts where some are known: nothing of those that say no more."""
    changed = []
    for key, row in new.items():
        old = known.get(key)
        if old is None:
            changed.append(Changed(None, stored(row)))
        elif old != row and (merged := merge_rows(old, row)) != old:
            changed.append(Changed(stored(old), stored(merged)))
    return changed


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration: bounds grow by a factor of 2 ** (1 / _PER_OCTAVE)."""
    return math.ceil(_PER_OCTAVE * log2(seconds / _UNIT_S)) if _UNIT_S < seconds < math.inf else 0


def middle_of(bucket: int) -> float:
    """Return the geometric middle of a bucket in seconds: within 9 % of all that is in it."""
    return _UNIT_S * 2.0 ** ((bucket - 0.5) / _PER_OCTAVE) if bucket else 0.0


class NamesInUse:
    """The functions of each job that are counted by themselves, as far as this process knows."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}

    def unknown(self, rows: Iterable[Changed]) -> set[str]:
        """Return the jobs of some rows whose names are still to be learned, before these are counted."""
        if len(self._names) > MAX_NAMES:
            self._names.clear()
        return {row.now[2] for row in rows} - self._names.keys()

    def learn(self, job_id: str, names: Iterable[str]) -> None:
        """Note what is counted of a job."""
        self._names[job_id] = set(names)

    def counted_as(self, job_id: str, name: str) -> str:
        """Return the name under which a function of a job is counted."""
        names = self._names.setdefault(job_id, set())
        if name not in names:
            if len(names) >= MAX_NAMES:
                return OTHERS
            names.add(name)
        return name


def deltas(changed: Sequence[Changed], names: NamesInUse) -> Deltas:
    """Return what written attempts change in the counts and histograms."""
    sums = _Sums(names)
    sums.add([now for _, now in changed], 1)
    sums.add([before for before, _ in changed if before is not None], -1)
    return Deltas(
        [(*key, count) for key, count in sorted(sums.counts.items()) if count],
        [
            (*key, n, total_s)
            for key, (n, total_s) in sorted(sums.durations.items())
            if n or total_s
        ],
    )


class _Sums:
    """The sums of one batch. This runs for each attempt of the cluster, so it goes by groups: 1 us."""

    def __init__(self, names: NamesInUse) -> None:
        self._names = names
        self.counts: dict[tuple[str, str, str, str], int] = {}
        self.durations: dict[tuple[str, str, str, int], tuple[int, float]] = {}

    def add(self, rows: Sequence[StoredTask], by: int) -> None:
        """Count attempts, or with ``by`` of -1 count them no more."""
        groups: defaultdict[tuple[str, str, str, int], list[StoredTask]] = defaultdict(list)
        for row in rows:
            groups[row[2], row[4], row[3], row[7]].append(row)
        for (job_id, given, state, rank), group in groups.items():
            name = self._names.counted_as(job_id, given)
            codes = Counter(map(_code_of, group)) if state in _WITH_ERROR else {"": len(group)}
            for code, count in codes.items():
                key = (job_id, name, state, code)
                self.counts[key] = self.counts.get(key, 0) + by * count
            if rank < INFERRED_RANK:
                continue  # it has not ended
            waits = [b - a for *_, a, b, _, _ in group if a is not None and b is not None]
            runs = [b - a for *_, a, b, _ in group if a is not None and b is not None]
            self._add(job_id, name, WAIT, waits, by)
            self._add(job_id, name, RUN, runs, by)
            held = held_times((row[10], row[11], row[8]) for row in group)
            for measure, held_s in held.items():
                self._hold(job_id, name, measure, held_s, by)

    def _hold(self, job_id: str, name: str, measure: str, held_s: float, by: int) -> None:
        key = (job_id, name, measure, 0)
        known, known_s = self.durations.get(key, _NOTHING)
        self.durations[key] = (known, known_s + by * held_s)

    def _add(self, job_id: str, name: str, measure: str, times: list[float], by: int) -> None:
        # All of it in the first bucket: whoever reads sums over them.
        total_s = by * sum(max(0.0, one) for one in times)
        for bucket, count in Counter(map(bucket_of, times)).items():
            key = (job_id, name, measure, bucket)
            known, known_s = self.durations.get(key, _NOTHING)
            self.durations[key] = (known + by * count, known_s + total_s)
            total_s = 0.0


def held_times(attempts: Iterable[tuple[float | None, float | None, bytes]]) -> dict[str, float]:
    """Return by measure what attempts held, in seconds times what: given their start, end and facts."""
    sums: defaultdict[str, float] = defaultdict(float)
    for started_s, ended_s, packed in attempts:
        if started_s is None or ended_s is None or ended_s <= started_s:
            continue
        cpus, gpus, group_id = held_in(packed)
        run_s = ended_s - started_s
        if cpus:
            sums[CPU] += cpus * run_s
        if gpus:
            sums[GPU] += gpus * run_s
        if group_id:
            sums[GROUP_CPU] += cpus * run_s
            sums[GROUP_GPU] += gpus * run_s
    return sums


def _code_of(row: StoredTask) -> str:
    error = record_of(row[:9]).error
    return "" if error is None else error.code.replace("\0", "\ufffd")  # PostgreSQL has no NUL
