"""The controller of a sharded job: it places a gang, hears its ranks, and begins a new one after a loss.

One thread takes reports from a queue and looks at the clock; others bring what ranks report and users ask
for. It makes no step itself, and what a gang had that was ended counts no more.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from stoker.exceptions import FencedError, PlacementGroupRemovedError, StokerError
from stoker_train.elastic.replica.reports import Value
from stoker_train.sharded.controller.gang import Gang
from stoker_train.sharded.options import ShardedResult
from stoker_train.sharded.rank import reports as said

if TYPE_CHECKING:
    from stoker_train.sharded.records import FencedRecords, Spec

__all__ = ("Controller",)

_log = logging.getLogger("stoker.train.controller")
_MAX_REPORTS = 100_000
_TICK_S = 0.2
_WRITE_S = 0.5
_EXPLAIN_S = 2.0
_SETTLE_S = 1.5
"""After a failure: what else fails with it, and is its cause? Who waits for a dead rank hears of it first."""
_STOPPED_S = 2.0
_MOST_DELAY_S = 10.0
_GANGS_PER_ATTEMPT = 1_000_000


class Controller:
    """One attempt of one job, whose records it has taken over. ``run`` returns whether all went well.

    ``known``: how the job was in an attempt before.
    """

    def __init__(
        self, records: FencedRecords, spec: Spec, known: Mapping[str, Any] | None = None
    ) -> None:
        self._records, self._spec = records, spec
        self._queue: queue.Queue[Any] = queue.Queue(_MAX_REPORTS)
        self._gang_number = records.attempt * _GANGS_PER_ATTEMPT
        self._progress: dict[str, Any] = {
            "phase": "PLACING",
            "plan": str(spec.strategy),
            "strategy": _plain(spec.strategy),
            "stages": [list(one) for one in spec.stages],
            "ranks": [],
            "step": 0,
            "committed": (known or {}).get("committed", 0),
            "restarts": 0,
            "metrics": {},
        }
        self._written: dict[str, Any] = {}
        self._written_s = 0.0
        self._failures: list[said.Failed | said.Died] = []
        self._failed_s = 0.0
        self._in_a_row = 0
        """Restarts since the last commit."""
        self._ready: dict[int, said.Ready] = {}
        self._returned: dict[int, said.Returned] = {}
        self._value: Value | None = None
        self._started_s = self._explained_s = self._not_before_s = 0.0
        self._looked_s = time.monotonic()
        self._watches, self._is_fenced = True, False
        self._end: tuple[str, str] | None = None
        """The error and its kind; both empty if all went well."""
        if (known or {}).get("stops"):
            self._progress["stops"] = True

    def run(self) -> bool:
        """Train until the end, whichever it is; writes the result."""
        if self._progress.get("stops"):
            self._end_at_commit()
            return self._finish()
        follow = partial(self._records.follow_asks, self._put_asks, lambda: self._watches)
        asks = threading.Thread(target=follow, name="asks", daemon=True)
        try:
            self._gang = Gang(self._records.job_id, self._spec, self._queue.put)
        except StokerError as error:
            self._end = str(error), "start"
            return self._finish()
        try:
            asks.start()
            while self._end is None:
                if self._progress["phase"] == "PLACING":
                    self._place()
                else:
                    self._take(self._next())
                    self._look()
                self._write()
        except FencedError as error:
            self._end, self._is_fenced = (str(error), "fenced"), True
        finally:
            self._watches = False
            self._gang.close()
            asks.join(timeout=10.0)
        return self._finish()

    def _place(self) -> None:
        """Wait a moment for the bundles; start the ranks once they are there."""
        if time.monotonic() < self._not_before_s:
            time.sleep(_TICK_S)
            return
        try:
            placed = self._gang.is_placed(_TICK_S)
        except PlacementGroupRemovedError as error:
            self._end = str(error), "lost"
            return
        now_s = time.monotonic()
        if not placed:
            if now_s - self._explained_s > _EXPLAIN_S:
                self._explained_s = now_s
                self._progress["waits_for"] = self._gang.reason()
            while not self._queue.empty():  # a stop may be asked for
                self._take(self._queue.get_nowait())
            return
        self._progress.pop("waits_for", None)
        self._gang_number += 1
        self._ready, self._returned, self._failures = {}, {}, []
        self._gang.start(self._gang_number)
        self._started_s = now_s
        self._progress |= {
            "phase": "STARTING",
            "ranks": [{"rank": rank, "node": node} for rank, node in enumerate(self._gang.nodes)],
        }
        _log.info("gang %d: %d ranks start", self._number, len(self._gang.nodes))

    @property
    def _number(self) -> int:
        return self._gang_number % _GANGS_PER_ATTEMPT

    def _next(self) -> Any:
        try:
            return self._queue.get(timeout=_TICK_S)
        except queue.Empty:
            return None

    def _take(self, report: Any) -> None:
        if isinstance(report, dict):
            self._ask(str(report.get("what", "")))
            return
        if isinstance(report, Value):
            self._value = report
            return
        if getattr(report, "gang", self._gang_number) != self._gang_number:
            return  # of a gang that was ended
        match report:
            case said.Ready():
                self._ready[report.rank] = report
                self._progress["ranks"][report.rank] |= {
                    "node": report.node_id,
                    "gpus": list(report.gpus),
                    "pid": report.pid,
                }
            case said.Loaded() if report.rank == 0:
                self._progress |= {"phase": "RUNNING", "step": report.step}
                self._progress["committed"] = max(self._progress["committed"], report.step)
                _log.info("gang %d goes on from step %d", self._number, report.step)
            case said.Stepped():
                metrics = {**report.metrics, "step": report.step}
                self._progress |= {"step": report.step, "metrics": metrics}
            case said.Committed() if report.problem:
                _log.warning("no checkpoint of step %d: %s", report.step, report.problem)
            case said.Committed():
                self._progress["committed"] = report.step
                self._in_a_row = 0
            case said.Died() if report.rank in self._returned:
                pass  # it had ended, and nobody waits for it
            case said.Failed() | said.Died():
                if not self._failures:
                    self._failed_s = time.monotonic()
                self._failures.append(report)
                _log.warning("%s: %s", self._name(report.rank), _told(report))
            case said.Returned():
                self._returned[report.rank] = report
                if len(self._returned) == self._spec.strategy.gpus:
                    self._progress["step"] = report.step
                    self._end = "", ""

    def _ask(self, what: str) -> None:
        if what == "stop":
            self._progress["stops"] = True  # also for the next gang, and the next controller
        if what == "stop" and self._progress["phase"] == "PLACING":
            self._end_at_commit()
        elif what in ("stop", "checkpoint"):
            self._gang.tell(0, "ask", what)
        else:
            _log.warning("%r is no order", what)

    def _end_at_commit(self) -> None:
        """End well without a gang: what its last checkpoint has is the end."""
        self._progress["step"] = self._progress["committed"]
        self._end = "", ""

    # From time to time.

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s > _STOPPED_S:  # this process was stopped: nobody could be heard
            self._gang.excuse(now_s)
        self._looked_s = now_s
        failure = self._spec.failure
        if self._end is not None:
            return
        if self._failures:
            if self._is_clear(now_s):
                self._judge()
            return
        late = [n for n in range(self._spec.strategy.gpus) if n not in self._ready]
        if late and now_s - self._started_s > failure.start_s:
            why = f"it did not start within {failure.start_s:g} s"
            self._take(said.Died(late[0], self._gang_number, why))
            return
        for rank in self._gang.silent(failure.hang_s):
            if rank in self._ready and rank not in self._returned:
                why = f"it said nothing for {failure.hang_s:g} s"
                self._take(said.Died(rank, self._gang_number, why))

    def _is_clear(self, now_s: float) -> bool:
        """Return whether the cause of the failures is known: a death is one, others are waited for."""
        if any(isinstance(one, said.Died) for one in self._failures):
            return True
        return now_s - self._failed_s > _SETTLE_S

    def _judge(self) -> None:
        """End the gang after a failure, and the job if it was the loop's own or there were too many."""
        cause = _cause(self._failures)
        why = f"{self._name(cause.rank)}: {_told(cause)}"
        if isinstance(cause, said.Failed) and cause.kind == "loop":
            self._end = f"{why}\n{cause.trace}", "loop"
            return
        if isinstance(cause, said.Failed) and cause.kind == "fenced":
            self._end = why, "fenced"
            return
        if self._progress.get("stops"):
            _log.warning("it was to stop, and ends at its newest checkpoint: %s", why)
            self._end_at_commit()
            return
        if self._in_a_row >= self._spec.failure.retries:
            many = f" (after {self._in_a_row} restarts without a checkpoint in between)"
            self._end = f"{why}{many if self._in_a_row else ''}", "lost"
            return
        # A node that is lost may be found to be so a moment after its ranks.
        self._not_before_s = time.monotonic() + min(_MOST_DELAY_S, 2.0 * self._in_a_row)
        self._in_a_row += 1
        self._progress["restarts"] += 1
        self._progress |= {"phase": "PLACING", "why": why}
        _log.warning(
            "the gang begins anew from the newest checkpoint (step %d): %s",
            self._progress["committed"],
            why,
        )
        self._gang.kill_all()

    def _name(self, rank: int) -> str:
        strategy = self._spec.strategy
        stage = rank // strategy.pipeline_stride % strategy.pipeline
        data = rank // strategy.data_stride % strategy.data
        place = f"data {data}, tensor {rank % strategy.tensor}, stage {stage}"
        where = self._progress["ranks"][rank].get("node", "")
        return f"rank {rank} ({place}) on {where}"

    # What is asked for, and what is told.

    def _put_asks(self) -> None:
        for one in self._records.take_asks():
            self._queue.put(one)

    def _write(self) -> None:
        """Write how the job is, where that has changed; a gcs that is away is tried again."""
        now_s = time.monotonic()
        if now_s - self._written_s < _WRITE_S or self._progress == self._written:
            return
        self._written_s = now_s
        try:
            self._records.write_progress(self._progress)
        except FencedError:
            raise
        except StokerError as error:
            if not error.retryable:
                raise
            _log.warning("it is tried again: %s", error)
            return
        self._written = {**self._progress, "ranks": [dict(r) for r in self._progress["ranks"]]}

    def _finish(self) -> bool:
        assert self._end is not None
        while not self._queue.empty():  # what was reported before the end
            report = self._queue.get_nowait()
            if isinstance(report, said.Stepped | said.Committed | Value):
                self._take(report)
        error, kind = self._end
        if self._is_fenced:
            _log.error("%s", error)
            return False
        self._progress["phase"] = "FAILED" if error else "FINISHED"
        if error:
            self._progress["why"] = error.partition("\n")[0]
            _log.error("%s", error)
        try:
            self._records.write_result(self._result(error, kind), self._progress)
        except FencedError as refused:
            _log.error("%s", refused)
            return False
        try:
            self._records.drop_work()
        except StokerError as left:
            _log.info("keys of the job are left: %s", left)
        return not error

    def _result(self, error: str, kind: str) -> ShardedResult:
        result = ShardedResult(
            metrics=self._progress["metrics"],
            checkpoint=str(self._spec.checkpoint.path),
            steps=self._progress["step"],
            restarts=self._progress["restarts"],
            error=error,
            error_kind=kind,
            job_id=self._records.job_id,
        )
        if self._value is not None:
            result.value, result.value_problem = self._value.load()
        return result


def _cause(failures: list[said.Failed | said.Died]) -> said.Failed | said.Died:
    """Return the failure that the others come of: a death, then an error of a loop, then who waited first."""

    def order(one: said.Failed | said.Died) -> int:
        if isinstance(one, said.Died):
            return 0
        return 2 if one.kind == "lost" else 1

    return min(failures, key=order)


def _told(one: said.Failed | said.Died) -> str:
    if isinstance(one, said.Died):
        return f"it has died: {one.why}"
    first = one.error.partition("\n")[0]
    if one.kind == "loop":
        return f"its loop raised {first} (in {one.where})"
    if one.kind == "fenced":
        return f"another training has taken its checkpoints over: {first} (in {one.where})"
    return f"it waited in vain for the others, in {one.where}: {first}"


def _plain(strategy: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        name: value if isinstance(value, int | bool) and not math.isnan(value) else str(value)
        for name, value in asdict(strategy).items()
    }
