"""The controller of an elastic job: it does what the generation machine commands, and tells it what happens.

One thread takes events from a queue, steps the machine and does its commands; others bring events (replicas'
reports, the scheduler's offers, what users ask for) or write what need not be waited for. It makes no choice
about memberships itself.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

from stoker import kv
from stoker.exceptions import FencedError, StokerError
from stoker.runtime import current
from stoker.train.elastic import Session, join
from stoker_train.elastic.controller.accounts import Accounts
from stoker_train.elastic.controller.decisions import Decisions
from stoker_train.elastic.controller.offers import (
    Offers,
    node_filter_without,
    replicas_of,
    slots_of,
)
from stoker_train.elastic.controller.replicas import Replicas
from stoker_train.elastic.core import events as ev
from stoker_train.elastic.core.machine import begin, step
from stoker_train.elastic.core.membership import Commit, SetLr, SetShares, SetSync, Stop, Suspend
from stoker_train.elastic.core.phases import OVER, Limits, Phase, State
from stoker_train.elastic.core.places import avoided, unwanted
from stoker_train.elastic.core.replacing import spares
from stoker_train.elastic.optimization import priors
from stoker_train.elastic.options import ResizeCost
from stoker_train.elastic.replica import reports as said
from stoker_train.elastic.replica.actor import Work
from stoker_wire.messages.elastic import ReportGenerationTurn
from stoker_wire.messages.work import ReportSlowRank, SlowRank

if TYPE_CHECKING:
    from stoker_train.elastic.controller.fenced import FencedRecords
    from stoker_train.elastic.records import Spec

__all__ = ("Controller",)

_log = logging.getLogger("stoker.train.controller")
_MAX_EVENTS = 100_000
_TICK_S = 0.2
_HINT_S = 1.0
_STOPPED_S = 2.0
_PERSIST_S = 300.0
"""A gcs that is away for so long ends the attempt."""
_WORKERS_PER_ATTEMPT = 1_000_000


class Controller:
    """One attempt of one job, whose records it has taken over. ``run`` returns whether all went well."""

    def __init__(self, records: FencedRecords, spec: Spec) -> None:
        self.records, self.spec = records, spec
        self._queue: queue.Queue[Any] = queue.Queue(_MAX_EVENTS)
        self.accounts = Accounts(records, self._queue.put)
        self.decisions = Decisions(spec.scaling, _prior(spec))
        work = Work(
            spec.loop,
            spec.config,
            spec.sync,
            spec.policies,
            spec.scaling,
            spec.checkpoint,
            spec.failure,
            spec.seed,
            tuple(sys.path),
        )
        self.replicas = Replicas(work, spec.scaling.resources, self._queue.put)
        previous = records.membership()
        generation = previous.generation if previous is not None else 0
        self.state: State = begin(
            records.job_id,
            Limits(
                min_replicas=self._least,
                max_replicas=spec.scaling.max_replicas,
                start_s=spec.failure.start_s,
                replace_s=spec.failure.start_s,
                settle_s=1.5 * spec.failure.collective_timeout_s,
                form_s=spec.failure.collective_timeout_s,
            ),
            generation=generation,
            first_worker=records.attempt * _WORKERS_PER_ATTEMPT + 1,
            has_trained=generation > 0,
            at_s=time.monotonic(),
        )
        self.accounts.generations = generation
        self._end: ev.End | None = None
        self._stopped = False
        self._most = spec.scaling.max_replicas
        self._avoided: frozenset[str] = frozenset()
        self._hinted_s = self._ticked_s = 0.0
        self._looked_s = time.monotonic()
        self._drained: tuple[float, int, int] | None = None
        self._failure: StokerError | None = None

    @property
    def _least(self) -> int:
        scaling = self.spec.scaling
        return scaling.max_replicas if scaling.adapt == "none" else scaling.min_replicas

    def run(self) -> bool:
        """Train until the end, whichever it is; writes the result."""
        scaling = self.spec.scaling
        session = join(
            base_batch=scaling.base_batch,
            max_batch=scaling.most_in_batch,
            min_local_batch=scaling.locals[0],
            max_local_batch=scaling.locals[1],
            min_replicas=self._least,
            max_replicas=scaling.max_replicas,
            resources=scaling.resources,
            grace_s=scaling.grace_s,
            report_interval_s=_HINT_S,
        )
        self.offers = Offers(session, self._queue.put)
        self.session: Session = session
        self._watches = True
        follow = partial(self.records.follow_asks, self._put_asks, lambda: self._watches)
        asks = threading.Thread(target=follow, name="asks", daemon=True)
        try:
            self.offers.start()
            asks.start()
            self._hint()
            while self._end is None:
                self._take(self._next())
            return self._finish(self._end)
        finally:
            self._watches = False
            self.offers.stop()
            self.replicas.kill_all()
            if not self._is_past:  # the replicas of a later attempt are not ours to release
                try:
                    session.close()
                except StokerError as error:
                    _log.info("the session had ended: %s", error)
            asks.join(timeout=10.0)

    @property
    def _is_past(self) -> bool:
        """Whether another controller has taken this job over."""
        return self._end is not None and self._end.kind == "fenced"

    def _next(self) -> Any:
        try:
            return self._queue.get(timeout=_TICK_S)
        except queue.Empty:
            return ev.Tick(0.0)

    def _take(self, report: Any) -> None:
        match report:
            case said.Beat():
                pass
            case said.Progress():
                self._progress(report)
            case said.Saved():
                self._saved(report)
            case said.Paused():
                self.accounts.paused(report)
                self._hint()
            case said.Wish():
                for request in report.requests:
                    self._request(request.kind, request.value, request.reason)
            case said.OutOfMemory():
                lower = self.decisions.out_of_memory(report.local)
                self._step(ev.OutOfMemory(time.monotonic(), report.worker, report.local, lower))
            case said.Value():
                self.accounts.value = report
            case FencedError():
                self._step(ev.Fenced(time.monotonic(), self.state.generation))
            case StokerError():
                self._failure = report
                self._end = ev.End(
                    f"the scheduler has no more to do with this job\n{report}", "lost"
                )
            case dict():
                self._ask(report)
            case _:
                self._event(report)
        self._look()

    def _event(self, event: Any) -> None:
        if isinstance(event, ev.Died):
            self.replicas.kill(event.worker)
        elif isinstance(event, ev.Broken):
            _log.info("replica %d: %s", event.worker, event.why.replace("\n", " "))
        self._step(_now(event))

    def _step(self, event: ev.Event) -> None:
        self.state, commands = step(self.state, event)
        for command in commands:
            self._do(command)

    def _do(self, command: ev.Command) -> None:
        match command:
            case ev.Launch():
                self.replicas.launch(
                    command.worker,
                    command.slot,
                    rehearse=command.rehearse,
                    local=self.state.local,
                )
            case ev.Kill():
                self.replicas.kill(command.worker)
            case ev.WriteMembership():
                self._write(command)
            case ev.Send():
                for worker in command.workers:
                    self.replicas.order(worker, command.order)
            case ev.Form():
                self.accounts.forming(time.monotonic())
                for worker in command.workers:
                    self.replicas.form(worker, command)
            case ev.Interrupt():
                for worker in command.workers:
                    self.replicas.interrupt(worker, command.generation)
            case ev.Accept():
                if not _persistently(lambda: self._accept(command.number)):
                    held = slots_of(self.session.state.replicas)
                    self._queue.put(ev.Granted(0.0, held))
            case ev.Void():
                self.accounts.void(command.step, command.generation)
            case ev.Turn():
                self._turn(command)
            case ev.Say():
                self._say(command.text)
            case ev.End():
                self._end = command

    def _accept(self, number: int) -> bool:
        """Accept an offer, which is to this attempt: another's controller would take its replicas."""
        if not self.records.holds():
            self._queue.put(ev.Fenced(0.0, self.state.generation))
            return False
        return self.offers.accept(number)

    def _write(self, command: ev.WriteMembership) -> None:
        generation = command.membership.generation
        membership, after = command.membership, command.after
        if _persistently(lambda: self.records.write_membership(membership, after)):
            self.accounts.generations = generation
            self._queue.put(ev.Wrote(0.0, generation))
        else:
            self._queue.put(ev.Fenced(0.0, generation))

    def _say(self, text: str) -> None:
        """Tell who follows the job, and who reads its story, what happens or what it waits for."""
        membership, phase = self.state.membership, str(self.state.phase)
        _log.info("%s", text)
        self.accounts.say(membership, phase, text)
        world = membership.world_size if membership is not None else 0
        self._tell(self.state.generation, phase, phase, text, world)

    def _tell(self, generation: int, before: str, after: str, why: str, replicas: int) -> None:
        self.accounts.tell(
            ReportGenerationTurn(
                generation=generation, before=before, after=after, why=why[:500], replicas=replicas
            )
        )

    def _turn(self, turn: ev.Turn) -> None:
        _log.info("generation %d: %s -> %s: %s", turn.generation, turn.before, turn.after, turn.why)
        self.accounts.say(self.state.membership, turn.after, turn.why)
        self._tell(turn.generation, turn.before, turn.after, turn.why, turn.world_size)
        if turn.before == Phase.DRAINING and turn.after == Phase.FORMING:
            self._drained = turn.at_s, turn.generation, turn.world_size
        if turn.after == Phase.RUNNING:
            self.accounts.formed(turn.at_s)
        if turn.after == Phase.RUNNING and self._drained is not None:
            began_s, _, before = self._drained
            self._drained = None
            cost = ResizeCost(
                "checkpoint",
                turn.generation,
                before,
                turn.world_size,
                time.monotonic() - began_s,
                self.accounts.ledger.next_step,
            )
            self.accounts.add_resize(cost)

    # What replicas tell.

    def _progress(self, report: said.Progress) -> None:
        if not self.accounts.add(report):
            return
        membership = self.state.membership
        pending = self.state.pending
        for one in (membership, pending):
            if one is not None and one.generation == report.generation:
                slow = self.decisions.add(one, report.tables, report.metrics, report.noise)
                for event in slow:
                    self._slow(event)

    def _saved(self, report: said.Saved) -> None:
        if report.problem:
            _log.warning("no checkpoint of step %d: %s", report.step, report.problem)
        else:
            self.accounts.checkpoint = report.path

    def _slow(self, slow: Any) -> None:
        _log.warning(
            "%s %s of %s computes %.2f times slower than the others",
            slow.kind,
            list(slow.ranks),
            slow.node,
            slow.ratio,
        )
        runtime = current.runtime()
        for rank in slow.ranks:
            body = ReportSlowRank(
                node_id=slow.node,
                rank=rank,
                ratio=max(1.001, min(1e6, slow.ratio)),
                since_s=time.time(),
                group="elastic",
            )
            path = f"/v1/jobs/{self.records.job_id}/slow-ranks"
            try:
                runtime.io.run(
                    runtime.clients.gcs.call("POST", path, body, reply=SlowRank, timeout_s=5.0), 6.0
                )
            except StokerError as error:
                _log.info("the slow rank was not reported: %s", error)

    # What is asked for.

    def _put_asks(self) -> None:
        if not self.records.holds():
            self._queue.put(ev.Fenced(0.0, self.state.generation))
            return
        for ask in self.records.take_asks():
            self._queue.put(ask)

    def _ask(self, ask: dict[str, Any]) -> None:
        what = ask.get("what", "")
        if what == "replace":
            membership = self.state.membership
            members = membership.members if membership is not None else ()
            for member in members:
                if member.rank == ask.get("rank"):
                    self._step(ev.Replaced(time.monotonic(), member.incarnation))
        else:
            self._request(what, ask.get("value"), "asked for by the user")

    def _request(self, kind: str, value: Any, reason: str) -> None:
        now_s = time.monotonic()
        _log.info("%s %s: %s", kind, "" if value is None else value, reason)
        try:
            match kind:
                case "resize":
                    self._resize(int(value))
                case "set_batch_size":
                    self._step(ev.Asked(now_s, self.decisions.allowed(int(value))))
                case "set_lr":
                    self._step(ev.Asked(now_s, SetLr(float(value))))
                case "set_sync":
                    name = value.get("name", "") if isinstance(value, dict) else str(value)
                    self._step(ev.Asked(now_s, SetSync(bytes(cloudpickle.dumps(value)), name)))
                case "set_shares":
                    self._step(ev.Asked(now_s, SetShares(tuple(map(float, value)))))
                case "stop":
                    self._stopped = True
                    self._step(ev.Asked(now_s, Stop(reason)))
                case "checkpoint":
                    self._step(ev.Asked(now_s, Commit()))
                case "restart":
                    self._step(ev.Asked(now_s, Suspend()))
                case _:
                    _log.warning("nothing is known of %r", kind)
        except (ValueError, TypeError, StokerError) as error:
            _log.warning("%s %s is not done: %s", kind, value, error)

    def _resize(self, count: int) -> None:
        """Have the scheduler give so many replicas at most, within the job's limits.

        Not so many at least: what a node cannot give would cost the job all that it has.
        """
        scaling = self.spec.scaling
        self._most = max(self._least, min(count, scaling.max_replicas))
        self.session.limit(min_replicas=self._least, max_replicas=self._most)

    # From time to time.

    def _look(self) -> None:
        now_s = time.monotonic()
        if (
            now_s - self._looked_s > _STOPPED_S
        ):  # this process was stopped: others had no chance to be heard
            self.replicas.excuse(now_s)
        self._looked_s = now_s
        if now_s - self._ticked_s > _TICK_S:  # reports come all the time: the clock's turn is kept
            self._ticked_s = now_s
            self._step(ev.Tick(now_s))
        for worker in self.replicas.silent(self._longest_silence_s):
            why = f"it said nothing for {self.spec.failure.hang_s:g} s"
            started = self.state.workers.get(worker)
            if started is None or str(started.life) == "STARTING":
                continue  # it starts: that has a limit of its own
            _log.warning("replica %d is ended: %s", worker, why)
            self.replicas.kill(worker)
            self._step(ev.Died(now_s, worker, why))
        if now_s - self._hinted_s > _HINT_S:
            self._hinted_s = now_s
            self._hint()
            order = self.decisions.another_batch(now_s)
            if order is not None and self.state.phase is Phase.RUNNING:
                _log.info("batch %d, %d in a pass, is better", order.batch, order.local)
                self._step(ev.Asked(now_s, order))

    @property
    def _longest_silence_s(self) -> float:
        return self.spec.failure.hang_s

    def _hint(self) -> None:
        if self.state.phase in OVER:
            return
        used = sum(one.count for one in self.accounts.ledger.entries[-1:])
        progress = float(self.accounts.ledger.next_step * self.spec.scaling.base_batch + used)
        hints = self.decisions.hints(self.accounts.restart_s, progress)
        if (count := spares(self.state)) > 0:
            hints["spares"] = count
        if self._avoids() and (slots := unwanted(self.state)):
            hints["unwanted"] = replicas_of(slots)
        self.session.report(**hints)

    def _avoids(self) -> bool:
        """Have the scheduler offer no node on which nothing starts; False if it could not be told."""
        nodes = avoided(self.state)
        if nodes != self._avoided:
            try:
                self.session.limit(
                    min_replicas=self._least,
                    max_replicas=self._most,
                    node_filter=node_filter_without(nodes),
                )
            except StokerError as error:
                _log.info("nodes are avoided later: %s", error)
                return False
            self._avoided = nodes
        return True

    def _finish(self, end: ev.End) -> bool:
        while True:  # what was reported before the end
            try:
                report = self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(report, said.Progress):
                self.accounts.add(report)
            elif isinstance(report, said.Saved):
                self._saved(report)
            elif isinstance(report, said.Value):
                self.accounts.value = report
        well = not end.error
        result = self.accounts.result(end.error, end.kind, finished=well and not self._stopped)
        if self._is_past:
            _log.error("%s", end.error)
            return False
        self.accounts.say(self.state.membership, str(self.state.phase), end.error)
        self.accounts.close()
        try:
            self.records.write_result(result)
        except FencedError as error:
            self._end = ev.End(str(error), "fenced")
            _log.error("%s", error)
            return False
        if end.error:
            _log.error("%s", end.error)
        elif self.spec.code_hash:
            self._keep_measurements()
        return well

    def _keep_measurements(self) -> None:
        """Leave what was measured to jobs with the same code."""
        try:
            priors.store(kv, self.spec.code_hash, self.decisions.measured())
        except StokerError as error:
            _log.info("what was measured is not kept: %s", error)


def _persistently(call: Callable[[], bool]) -> bool:
    """Return what ``call`` does, once the gcs answers; what it raised after ``_PERSIST_S`` seconds."""
    until_s = time.monotonic() + _PERSIST_S
    while True:
        try:
            return call()
        except StokerError as error:
            if not error.retryable or time.monotonic() > until_s:
                raise
            _log.warning("it is tried again: %s", error)
            time.sleep(_TICK_S)


def _prior(spec: Spec) -> priors.Prior | None:
    """Return what jobs with the same code have measured, where the user allows that."""
    if not spec.code_hash:
        return None
    try:
        return priors.load(kv, spec.code_hash)
    except StokerError as error:
        _log.info("what earlier jobs have measured is not known: %s", error)
        return None


def _now(event: Any) -> Any:
    """Return an event of a replica with the time at which it came."""
    import dataclasses

    return dataclasses.replace(event, at_s=time.monotonic())
