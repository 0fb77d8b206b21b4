"""The attempts that ran, as events of Chrome's Trace Event Format, for Perfetto and chrome://tracing.

A process of the format is a node, a thread a worker; where several calls run at once in an actor it has
several. Nothing is kept of what was made into events but where the last ones lie, for arrows. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from stoker.api.tracing.arrows import Arrows, Place
from stoker.api.tracing.lanes import Lanes, nested

Row = Mapping[str, Any]
Event = dict[str, Any]
_OWN = ("(driver)", "(worker)")
"""The names of records that have only spans, of code outside of tasks."""
_DRIVERS = "drivers"
_ATTEMPTS = 8
"""Earlier attempts of a caller that are looked at."""
_ROWS = {"transfer": "transfers to here", "spill": "spills to disk", "lease": "starts of workers"}


class Timeline:
    """The maker of one timeline's events.

    ``job_of`` returns the record of a job, or None. Of what still runs the end is ``now_s``. What was not
    under way between ``since_s`` and ``until_s`` is left out.
    """

    def __init__(
        self,
        job_of: Callable[[str], Row | None],
        hosts: Mapping[str, str],
        now_s: float,
        *,
        since_s: float = 0.0,
        until_s: float = float("inf"),
    ) -> None:
        self.attempts = 0
        """Attempts that are in it."""
        self.not_begun = 0
        self.spans_left_out = 0
        self._job_of = job_of
        self._hosts = hosts
        self._now_s = now_s
        self._since_s = since_s
        self._until_s = until_s
        self._lanes = Lanes()
        self._arrows = Arrows()
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[int, str, int], int] = {}
        self._drivers: dict[str, Place | None] = {}
        self._async_ids = 0

    @property
    def arrows_left_out(self) -> int:
        """Calls whose caller is not in it, or came too late."""
        return self._arrows.left_out

    def _shows(self, began_s: float, ended_s: float) -> bool:
        return ended_s >= self._since_s and began_s <= self._until_s

    # -- attempts --------------------------------------------------------------------------------

    def attempt(self, task: Row) -> Iterator[Event]:
        """Yield the events of an attempt: it, its spans, and the arrows to and from it."""
        began_s, ended_s = task.get("started_at_s"), task.get("ended_at_s")
        if not began_s:
            self.not_begun += 1
            return
        ended_s = max(began_s, ended_s or self._now_s)
        if not self._shows(began_s, ended_s):
            return
        spans = task.get("spans") or {}
        self.spans_left_out += spans.get("left_out", 0)
        items = spans.get("items") or ()
        if task["name"] in _OWN:
            yield from self._own_spans(task, items)
            return
        self.attempts += 1
        begin, end = _us(began_s), _us(ended_s)
        place = yield from self._place(task["node_id"] or "unknown node", _row_of(task), begin, end)
        yield self._attempt_event(task, place)
        yield from self._spans(items, place)
        yield from self._arrows.add_attempt(task["task_id"], task["attempt"], place)
        submitted_s = task.get("submitted_at_s")
        if submitted_s:
            yield from self._call(task, _us(submitted_s), place)

    def _attempt_event(self, task: Row, place: Place) -> Event:
        args = {
            "task_id": task["task_id"],
            "attempt": task["attempt"],
            "state": task["state"],
            "job_id": task["job_id"],
            "worker_id": task["worker_id"],
        }
        submitted_s = task.get("submitted_at_s")
        if submitted_s and not task["attempt"]:
            args["queued_ms"] = round(max(0.0, task["started_at_s"] - submitted_s) * 1e3, 3)
        for name in ("actor_id", "parent_task_id"):
            if task.get(name):
                args[name] = task[name]
        if task.get("error"):
            first = task["error"].get("message", "").partition("\n")[0]
            args["error"] = f"{task['error'].get('code', '')}: {first}"
        event = _slice(task["name"], "actor_task" if task["actor_id"] else "task", place, args)
        if task["state"] in ("FAILED", "CANCELLED"):
            event["cname"] = "terrible" if task["state"] == "FAILED" else "grey"
        return event

    def _call(self, task: Row, at: int, place: Place) -> Iterator[Event]:
        if parent := task.get("parent_task_id"):
            yield from self._arrows.add_call(parent, _ATTEMPTS, at, place)
            return
        driver = yield from self._driver(task["job_id"])
        if driver is None or not driver.holds(at):
            self._arrows.left_out += 1
        else:
            yield from self._arrows.arrow(driver, at, place)

    def _driver(self, job_id: str) -> Generator[Event, None, Place | None]:
        """Yield the slice of a job's driver, the first time; return where it is."""
        if job_id in self._drivers:
            return self._drivers[job_id]
        job, place = self._job_of(job_id), None
        began_s = (job or {}).get("started_at_s") or (job or {}).get("created_at_s")
        if job is not None and began_s:
            begin, end = _us(began_s), _us(max(began_s, job.get("ended_at_s") or self._now_s))
            place = yield from self._place(_DRIVERS, f"driver of {job_id}", begin, end)
            args = {
                "job_id": job_id,
                "state": job.get("state", ""),
                "node_id": job.get("node_id", ""),
            }
            yield _slice(job.get("name") or job.get("entrypoint") or job_id, "job", place, args)
        self._drivers[job_id] = place
        return place

    # -- spans -----------------------------------------------------------------------------------

    def _spans(self, items: Any, place: Place) -> Iterator[Event]:
        inside, across = nested(
            (
                max(_us(one["started_at_s"]), place.begin),
                min(_us(one["ended_at_s"]), place.end),
                one,
            )
            for one in items
            if _us(one["started_at_s"]) <= place.end and _us(one["ended_at_s"]) >= place.begin
        )
        for begin, end, one in inside:
            yield _slice(one["name"], "span", place._replace(begin=begin, end=end), _args_of(one))
        for one in across:
            yield from self._beside(one, place.pid, place.tid)

    def _own_spans(self, task: Row, items: Any) -> Iterator[Event]:
        """Yield the spans of code outside of tasks: several threads of it may have made them."""
        if task["name"] == _OWN[0]:
            place = yield from self._driver(task["job_id"])
            if place is not None:
                pid, tid = place.pid, place.tid
            else:
                pid, tid = yield from self._thread(_DRIVERS, f"driver of {task['job_id']}", 0)
        else:
            pid, tid = yield from self._thread(task["node_id"], _row_of(task), 0)
        for one in items:
            if self._shows(one["started_at_s"], one["ended_at_s"]):
                yield from self._beside(one, pid, tid)

    def _beside(self, span: Row, pid: int, tid: int) -> Iterator[Event]:
        """Yield a span that may overlap others of its thread."""
        self._async_ids += 1
        common = {
            "name": span["name"], "cat": "span", "id": self._async_ids, "pid": pid, "tid": tid
        }  # fmt: skip
        yield {**common, "ph": "b", "ts": _us(span["started_at_s"]), "args": _args_of(span)}
        yield {**common, "ph": "e", "ts": max(_us(span["started_at_s"]), _us(span["ended_at_s"]))}

    # -- nodes -----------------------------------------------------------------------------------

    def activity(self, node_id: str, one: Row) -> Iterator[Event]:
        """Yield the events of what a node did beside running calls."""
        if not self._shows(one["began_at_s"], one["ended_at_s"]):
            return
        begin, end = _us(one["began_at_s"]), _us(one["ended_at_s"])
        if one["kind"] == "gpus":
            pid = yield from self._process(node_id)
            yield {
                "name": "GPUs in use", "ph": "C", "pid": pid, "tid": 0, "ts": begin,
                "args": {"GPUs": one["amount"]},
            }  # fmt: skip
            return
        row = _ROWS.get(one["kind"])
        if row is None:
            return  # of a newer nodelet
        place = yield from self._place(node_id, row, begin, end)
        args = {name: one[name] for name in ("job_id", "nbytes") if one.get(name)}
        if one.get("peer"):
            args["from"] = one["peer"]
        yield _slice(one["name"], one["kind"], place, args)

    # -- rows ------------------------------------------------------------------------------------

    def _place(self, process: str, row: str, begin: int, end: int) -> Generator[Event, None, Place]:
        """Yield what names a row, the first time; return the place of a slice there."""
        lane = self._lanes.place((process, row), begin, end)
        pid, tid = yield from self._thread(process, row, lane)
        return Place(pid, tid, begin, end)

    def _process(self, process: str) -> Generator[Event, None, int]:
        pid = self._pids.get(process)
        if pid is None:
            pid = self._pids[process] = len(self._pids) + 1
            host = self._hosts.get(process, "")
            name = process if process == _DRIVERS else f"node {process}{host and f' on {host}'}"
            yield _named("process_name", pid, 0, name)
        return pid

    def _thread(self, process: str, row: str, lane: int) -> Generator[Event, None, tuple[int, int]]:
        pid = yield from self._process(process)
        tid = self._tids.get((pid, row, lane))
        if tid is None:
            tid = self._tids[pid, row, lane] = len(self._tids) + 1
            yield _named("thread_name", pid, tid, f"{row} ({lane + 1})" if lane else row)
        return pid, tid

    def close(self) -> None:
        """Count the calls whose callers did not come."""
        self._arrows.close()


def _us(at_s: float) -> int:
    """Return a time in whole microseconds, so that what touches does not overlap by a rounding."""
    return round(at_s * 1e6)


def _row_of(task: Row) -> str:
    if task["actor_id"]:
        return f"actor {task['name'].partition('.')[0]} {task['actor_id']}"
    return f"worker {task['worker_id']}" if task["worker_id"] else "unknown worker"


def _slice(name: str, kind: str, place: Place, args: dict[str, Any]) -> Event:
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "pid": place.pid,
        "tid": place.tid,
        "ts": place.begin,
        "dur": place.end - place.begin,
        "args": args,
    }


def _args_of(span: Row) -> dict[str, Any]:
    args = dict(span.get("attributes") or {})
    return {**args, "error": span["error"]} if span.get("error") else args


def _named(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
