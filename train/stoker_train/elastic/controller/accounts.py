"""The accounts of a job: its ledger, its last values, what its resizes cost, and the result they make.

The controller's thread adds; a thread of its own writes to the cluster's KV, so that no decision waits.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

from stoker.exceptions import FencedError, StokerError
from stoker_train.elastic.core.ledger import Ledger, decode
from stoker_train.elastic.options import ResizeCost, Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from stoker_train.elastic.controller.fenced import FencedRecords
    from stoker_train.elastic.core.membership import Membership
    from stoker_train.elastic.replica.reports import Paused, Progress, Value
    from stoker_wire.messages.elastic import ReportGenerationTurn

__all__ = ("Accounts",)

_log = logging.getLogger(__name__)
_WRITE_S = 1.0
_CLOSE_S = 30.0
_MAX_TURNS = 1000


class Accounts:
    """The state of a job's progress.

    ``fenced`` is called, by a thread of its own, once another controller has the job: it keeps nothing then.
    """

    def __init__(
        self, records: FencedRecords, fenced: Callable[[FencedError], None] | None = None
    ) -> None:
        self._records, self._fenced = records, fenced
        self._lock = threading.Lock()
        self.ledger: Ledger = decode(records.ledger())
        self.metrics: dict[str, Any] = dict(records.progress().get("metrics", {}))
        self.checkpoint, self.skipped = "", 0
        self.value: Value | None = None
        self.resizes: dict[int, ResizeCost] = {}
        self.generations = 0
        self._form_began_s: float | None = None
        self._form_took_s: float | None = None
        """What the first generation took to form: all that is known of the next before one was."""
        self.state: dict[str, Any] = {}
        self._newest = 0
        """The newest generation heard of: its rank 0 begins by what it has of those before."""
        self._turns: list[ReportGenerationTurn] = []
        self._unwritten: dict[str, bytes | None] = {}
        self._wake = threading.Event()
        self._ended, self._until_s = False, math.inf
        self._thread = threading.Thread(target=self._write_all, name="accounts", daemon=True)
        self._thread.start()

    def add(self, progress: Progress) -> bool:
        """Add what rank 0 has done; False if it is of a generation before the newest heard of."""
        with self._lock:
            if progress.generation < self._newest:
                return False
            self._newest = progress.generation
            self.ledger.extend(progress.entries)
            for epoch, length in progress.lengths.items():
                self.ledger.set_length(epoch, length)
            self.metrics.update(progress.metrics)
            self.skipped = max(self.skipped, progress.skipped)
        self._wake.set()
        return True

    def void(self, step: int, generation: int) -> None:
        """Void the entries of ``step`` and later; what older generations still say does not count."""
        with self._lock:
            self._newest = max(self._newest, generation)
            self.ledger.truncate(step)
        self._wake.set()

    def paused(self, report: Paused) -> None:
        """Note what a change of the membership has cost a survivor: the longest counts."""
        known = self.resizes.get(report.generation)
        if known is None or report.pause_s > known.pause_s:
            cost = ResizeCost(
                report.kind,
                report.generation,
                max(report.before, known.before if known is not None else 0),
                report.after,
                report.pause_s,
                report.step,
            )
            self.add_resize(cost)

    def add_resize(self, cost: ResizeCost) -> None:
        """Note what a change of the membership has cost."""
        with self._lock:
            self.resizes = {**self.resizes, cost.generation: cost}

    def costs(self) -> dict[str, float]:
        """Return the median seconds of each kind of resize."""
        kinds: dict[str, list[float]] = {}
        for one in self.resizes.values():
            kinds.setdefault(one.kind, []).append(one.pause_s)
        return {kind: statistics.median(seconds) for kind, seconds in kinds.items()}

    def forming(self, at_s: float) -> None:
        """Note that replicas, which are ready, are told to form a generation."""
        if self._form_began_s is None:
            self._form_began_s = at_s

    def formed(self, at_s: float) -> None:
        """Note that a generation trains."""
        if self._form_took_s is None and self._form_began_s is not None:
            self._form_took_s = at_s - self._form_began_s

    @property
    def restart_s(self) -> float | None:
        """The seconds that a change of replicas takes, as measured; None before any generation.

        Before the first change it is what the first generation took to form: newcomers start while the
        others train, so this is what those would wait for.
        """
        costs = self.costs()
        known = costs.get("memory", costs.get("restore", costs.get("checkpoint")))
        return self._form_took_s if known is None else known

    def result(self, error: str, kind: str, *, finished: bool) -> Result:
        """Close the accounts, and return what became of the job."""
        with self._lock:
            if finished:
                self.ledger.finish()
            problems = self.ledger.verify()
            unknown = not problems and not self.ledger.next_step
        if unknown:
            problems = [
                "no sample came from ctx.loader(): the ledger does not know which were used"
            ]
        value, value_problem = self._value()
        return Result(
            metrics=dict(self.metrics),
            checkpoint=self.checkpoint,
            generations=self.generations,
            resizes=[self.resizes[n] for n in sorted(self.resizes)],
            ledger_ok=None if unknown else not problems,
            ledger_problems=problems,
            steps=self.ledger.next_step,
            skipped_steps=self.skipped,
            error=error,
            error_kind=kind,
            job_id=self._records.job_id,
            value=value,
            value_problem=value_problem,
            costs=self.costs(),
        )

    def say(self, membership: Membership | None, phase: str, text: str = "") -> None:
        """Note how the job stands, for who follows it."""
        members = membership.members if membership is not None else ()
        self.state = {
            "phase": phase,
            "generation": membership.generation if membership is not None else 0,
            "replicas": len(members),
            "nodes": membership.nodes if membership is not None else {},
            "message": text or self.state.get("message", ""),
        }
        self._wake.set()

    def tell(self, turn: ReportGenerationTurn) -> None:
        """Have a turn of the generations written into the job's story."""
        with self._lock:
            self._turns.append(turn)
            del self._turns[:-_MAX_TURNS]
        self._wake.set()

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._until_s = time.monotonic() + _CLOSE_S
        self._ended = True
        self._wake.set()
        self._thread.join(timeout=_CLOSE_S + 1.0)

    def _value(self) -> tuple[Any, str]:
        """Return what the loop returned, and why it is not here if it is not."""
        return (None, "") if self.value is None else self.value.load()

    def _write_all(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ended = self._ended
            try:
                self._write()
            except FencedError as error:
                if self._fenced is not None:
                    self._fenced(error)
                return
            except Exception as error:  # whatever it is: without this thread nothing is kept
                _log.warning("the ledger was not written, and will be: %s", error)
                self._wake.set()
                ended = False
            if ended or time.monotonic() > self._until_s:
                return
            self._pause()

    def _pause(self) -> None:
        """Have changes of a moment written together."""
        waits = threading.Event()
        for _ in range(10):
            if self._ended:
                return
            waits.wait(_WRITE_S / 10)

    def _write(self) -> None:
        with self._lock:
            self._unwritten.update(self.ledger.changes())
            changes = dict(self._unwritten)
            values = {"metrics": dict(self.metrics), **self.state, "steps": self.ledger.next_step}
            values["checkpoint"], values["costs"] = self.checkpoint, self.costs()
        self._records.write_ledger(changes)
        with self._lock:
            self._unwritten = {
                name: data
                for name, data in self._unwritten.items()
                if name not in changes or data != changes[name]
            }
            turns, self._turns = self._turns, []
        self._records.write_progress(values)
        for turn in turns:
            try:
                self._records.write_turn(turn)
            except StokerError as error:
                _log.warning("a turn is not in the job's story: %s", error)
