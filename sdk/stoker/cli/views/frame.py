"""One frame of ``stoker top``: lines that fit a width and a height. Pure; ``screen`` shows them.

Sections share the height: each has its first row before one has a second. Rows that found no room are
counted, and never does a line wrap.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.output import ago, amount, duration, nbytes, plural, resources, table_lines
from stoker.cli.tables import Column, Row, cells_of, cut, render
from stoker.runtime.process.terminal import printable

if TYPE_CHECKING:
    from stoker.cli.views.snapshot import Snapshot

BAR = 20
ROWS = 20
"""Rows of a section where nothing bounds the height."""
_RESOURCES = 4
_FIRST = ("CPU", "GPU", "memory")
_RUNS = ("RUNNING",)
_WAITS = ("WAITING", "QUEUED")

GPUS = (
    Column("node", "node"),
    Column("gpu", "gpu"),
    Column("busy", "busy"),
    Column("memory", "memory", drop=1),
    Column("held by", "holders", drop=2, shrink=16),
    Column("name", "name", drop=3, shrink=10),
)
JOBS = (
    Column("job", "job"),
    Column("state", "state"),
    Column("running", "running"),
    Column("waiting", "waiting", drop=2),
    Column("finished", "finished", drop=2),
    Column("failed", "failed", drop=1),
    Column("for", "since", drop=3),
    Column("name", "name", drop=4, shrink=12),
    Column("user", "user", drop=5),
    Column("queue", "queue", drop=6),
)
WAITING = (
    Column("count", "count"),
    Column("what", "what", shrink=8),
    Column("for", "since", drop=3),
    Column("why", "why", drop=1, shrink=24),
    Column("job", "job", drop=2),
)
FAILURES = (
    Column("when", "when"),
    Column("kind", "kind", drop=3),
    Column("what", "what", shrink=8),
    Column("why", "why", drop=1, shrink=24),
    Column("job", "job", drop=2),
)
NODES = (
    Column("node", "node"),
    Column("state", "state", drop=2),
    Column("cpus", "cpus"),
    Column("gpus", "gpus", drop=1),
    Column("cpu", "cpu", drop=2),
    Column("memory", "memory", drop=3),
    Column("host", "host", drop=4, shrink=8),
)


@dataclass
class Section:
    """A part of the frame: a title and a table, of which as many rows are shown as there is room for."""

    title: str
    columns: Sequence[Column]
    rows: list[Row]
    shown: int = field(default=0)
    more: int = 0
    """Rows that were not asked for."""

    def height(self, shown: int) -> int:
        """The lines that so many rows take."""
        return 3 + shown + (shown + self.more < len(self.rows) + self.more or bool(self.more))

    def lines(self, width: int | None) -> list[str]:
        """Return the section as lines, an empty one first."""
        table = render(self.columns, self.rows[: self.shown], width)
        left = len(self.rows) - self.shown + self.more
        rest = [f"and {left} more"] if left else []
        return ["", click.style(self.title, bold=True), *table_lines(table), *rest]


def frame(seen: Snapshot, width: int | None, height: int | None, *, note: str = "") -> list[str]:
    """Return the lines of a frame; None is a pipe, where neither bounds it."""
    lines = [*_head(seen, note), *_resources(seen)]
    sections = [one for one in _sections(seen) if one.rows]
    share(sections, None if height is None else height - len(lines))
    for one in sections:
        if one.shown:
            lines += one.lines(width)
    lines = [clipped(line, width) for line in lines]
    return lines if height is None else lines[:height]


def share(sections: Sequence[Section], height: int | None) -> None:
    """Divide the height among the sections; None: each has up to :data:`ROWS` rows."""
    if height is None:
        for one in sections:
            one.shown = min(ROWS, len(one.rows))
        return
    left = height
    for one in sections:
        one.shown = 0
        if one.height(1) <= left:
            one.shown = 1
            left -= one.height(1)
    grew = True
    while grew:
        grew = False
        for one in sections:
            if 0 < one.shown < len(one.rows):
                more = one.height(one.shown + 1) - one.height(one.shown)
                if more <= left:
                    one.shown += 1
                    left -= more
                    grew = True


def clipped(line: str, width: int | None) -> str:
    """Return a line in at most ``width`` cells; one that is cut loses its colours."""
    if width is None:
        return line
    plain = click.unstyle(line)
    return line if cells_of(plain) <= width else cut(plain, width)


def bar(part: float, width: int = BAR) -> str:
    """Return a part of 1 as a bar: green, from 70 % on yellow, from 95 % on red."""
    part = min(1.0, max(0.0, part))
    full = round(part * width)
    colour = "red" if part >= 0.95 else "yellow" if part >= 0.7 else "green"
    return f"|{click.style('#' * full, fg=colour)}{'.' * (width - full)}|"


def _head(seen: Snapshot, note: str) -> list[str]:
    view = seen.overview
    at = time.strftime("%H:%M:%S", time.localtime(view.at_s))
    counts = [
        _counted(view.nodes, "node", ("ALIVE", "SUSPECT", "DEAD")),
        _counted(view.jobs, "job", ("RUNNING", "PENDING")),
        _counted(view.actors, "actor", ("ALIVE", "PENDING", "RESTARTING")),
        _counted(view.tasks, "task", ("RUNNING", "QUEUED", "WAITING", "FAILED")),
    ]
    head = f"{click.style('stoker', bold=True)} {printable(seen.address)}  {at}"
    lines = [head, "   ".join(counts)]
    missing = note or (view.missing and f"cannot say {view.missing}")
    return [*lines, click.style(printable(missing), fg="red")] if missing else lines


def _counted(counts: dict[str, int], what: str, states: Sequence[str]) -> str:
    texts = [f"{counts[state]} {state.lower()}" for state in states if counts.get(state)]
    return f"{what}s: {', '.join(texts) or 'none'}"


def _resources(seen: Snapshot) -> list[str]:
    """Return a bar for each resource, what everybody has first."""
    known = [(name, use) for name, use in seen.overview.resources.items() if use.total]
    known.sort(key=lambda one: (one[0] not in _FIRST, one[0]))
    shown = known[:_RESOURCES]
    wide = max((cells_of(printable(name)) for name, _ in shown), default=0)
    lines = [""] if shown else []
    for name, use in shown:
        text = f"{amount(name, use.used)}/{amount(name, use.total)}"
        if name == "GPU":
            text += _gpu_text(seen)
        elif name == "memory" and (measured := sum(one.memory_bytes or 0.0 for one in seen.nodes)):
            text += f", {nbytes(measured)} in use by processes"
        label = printable(name)
        lines.append(f"{label}{' ' * (wide - cells_of(label))} {bar(use.used / use.total)} {text}")
    if len(known) > len(shown):
        lines[-1] += f"  and {plural(len(known) - len(shown), 'more resource')}"
    return lines


def _gpu_text(seen: Snapshot) -> str:
    gpus = seen.overview.gpus
    busy = "" if gpus.utilisation is None else f", {gpus.utilisation:.0%} busy"
    if not gpus.memory_total_bytes:
        return busy
    return f"{busy}, memory {nbytes(gpus.memory_used_bytes)}/{nbytes(gpus.memory_total_bytes)}"


def _sections(seen: Snapshot) -> list[Section]:
    view = seen.overview
    live = sum(view.jobs.get(state, 0) for state in ("PENDING", "RUNNING"))
    return [
        Section("Jobs", JOBS, _job_rows(seen), more=max(0, live - len(seen.jobs))),
        Section("Waiting", WAITING, _waiting_rows(seen)),
        Section("Failures", FAILURES, _failure_rows(seen)),
        Section("GPUs", GPUS, _gpu_rows(seen)),
        Section("Nodes", NODES, _node_rows(seen)),
    ]


def _job_rows(seen: Snapshot) -> list[Row]:
    now_s = seen.overview.at_s
    return [
        {
            "job": job.job_id,
            "state": job.state,
            "running": _sum(job.tasks, _RUNS),
            "waiting": _sum(job.tasks, _WAITS),
            "finished": _sum(job.tasks, ("FINISHED",)),
            "failed": _sum(job.tasks, ("FAILED",)) or "",
            "since": duration(now_s - job.since_s),
            "name": job.name,
            "user": job.user,
            "queue": job.queue,
        }
        for job in seen.jobs
    ]


def _sum(counts: dict[str, int], states: Sequence[str]) -> int:
    return sum(counts.get(state, 0) for state in states)


def _waiting_rows(seen: Snapshot) -> list[Row]:
    return [
        {
            "count": one.count,
            "what": one.name or "group",
            "since": duration(seen.overview.at_s - one.since_s),
            "why": ("can never run: " if one.infeasible else "")
            + (one.cause or f"asks for {resources(one.resources)}"),
            "job": one.job_id,
        }
        for one in seen.overview.waiting
    ]


def _failure_rows(seen: Snapshot) -> list[Row]:
    return [
        {
            "when": ago(one.at_s) or "-",
            "kind": one.kind,
            "what": f"{one.name or one.id}" + (f" ({one.count} x)" if one.count > 1 else ""),
            "why": one.message.partition("\n")[0] or one.code,
            "job": one.job_id,
        }
        for one in seen.overview.failures
    ]


def _gpu_rows(seen: Snapshot) -> list[Row]:
    return [
        {
            "node": gpu.node_id,
            "gpu": gpu.index,
            "busy": _percent(gpu.percent),
            "memory": _memory(gpu.memory_bytes, gpu.memory_total_bytes),
            "holders": ", ".join(gpu.holders)
            if not gpu.quarantine
            else f"nobody: {gpu.quarantine}",
            "name": gpu.name,
        }
        for gpu in seen.gpus
    ]


def _node_rows(seen: Snapshot) -> list[Row]:
    return [
        {
            "node": node.node_id,
            "state": node.state,
            "cpus": _part(node.used, node.total, "CPU"),
            "gpus": _part(node.used, node.total, "GPU"),
            "cpu": _percent(node.cpu_percent),
            "memory": "" if node.memory_bytes is None else nbytes(node.memory_bytes),
            "host": node.hostname,
        }
        for node in seen.nodes
    ]


def _part(used: dict[str, float], total: dict[str, float], name: str) -> str:
    most = total.get(name, 0.0)
    return f"{used.get(name, 0.0):g}/{most:g}" if most else ""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def _memory(used: float | None, total: float) -> str:
    texts: list[Any] = [nbytes(value) for value in (used, total) if value is not None]
    return "/".join(texts)
