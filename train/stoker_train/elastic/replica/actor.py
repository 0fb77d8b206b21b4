"""The actor that is a replica: it runs the loop in a thread of its own, and answers the controller.

The controller starts one per slot (:mod:`stoker_train.elastic.controller.replicas`). Its methods return at
once; what the loop tells goes by the stream :meth:`Replica.reports`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker_train.elastic.core import events as ev
from stoker_train.elastic.options import Checkpoint, Failure, Scaling
from stoker_train.elastic.replica.link import Link
from stoker_train.elastic.replica.reports import OutOfMemory
from stoker_train.elastic.replica.returned import returned

if TYPE_CHECKING:
    from stoker_train.elastic.core.membership import Order

__all__ = ("Replica", "Work")

_log = logging.getLogger(__name__)
_TRACE_CHARACTERS = 4000


@dataclass(frozen=True)
class Work:
    """The work of all replicas; ``loop``, ``config``, ``sync`` and ``policies`` are pickles."""

    loop: bytes
    config: bytes
    sync: bytes
    policies: bytes
    scaling: Scaling
    checkpoint: Checkpoint
    failure: Failure
    seed: int = 0
    search_path: tuple[str, ...] = ()
    """Where the user's program finds its modules; a worker that was forked in advance has another."""


class Replica:
    """One replica. ``rehearse``: it runs one batch by itself before it says that it is ready."""

    def __init__(self, work: Work, worker: int, rehearse: bool, local: int | None) -> None:
        self._work, self._rehearse, self._local = work, rehearse, local
        self._link = Link(worker)
        self._generation = 0

    def reports(self) -> Iterator[list[Any]]:
        """Run the loop, and yield what it reports until it has ended; several at a time."""
        thread = threading.Thread(target=self._run, name="loop", daemon=True)
        thread.start()
        while (reports := self._link.drain()) is not None:
            waits = self._link.waiting()
            if waits is not None:
                generation, step, waited_s, line = waits
                reports.append(ev.Waiting(0.0, self._link.worker, generation, step, waited_s, line))
            yield reports

    def order(self, order: Order) -> None:
        """Take an order."""
        self._link.put_order(order)

    def form(self, form: ev.Form) -> None:
        """Take the order to form a generation."""
        self._link.put_form(form)

    def interrupt(self, generation: int) -> None:
        """Give up a generation, and all before it."""
        self._link.interrupt(generation)

    def _run(self) -> None:
        """Run the loop to its end, and report that."""
        self._link.thread_id = threading.get_ident()
        stage = _Stage()
        try:
            self._loop(stage)
        except BaseException as error:
            self._report_end(error, stage)

    def _loop(self, stage: _Stage) -> None:
        import cloudpickle
        import torch

        from stoker_train.elastic.replica.context import Context
        from stoker_train.elastic.replica.current import set_current
        from stoker_train.elastic.replica.engine import (
            Engine,
            LeaveTraining,
            StopTraining,
            code_version,
        )
        from stoker_train.elastic.replica.rehearsal import call, rehearse

        work = self._work
        sys.path += [path for path in work.search_path if path not in sys.path]
        torch.set_num_threads(max(1, int(work.scaling.resources.get("CPU", 1))))
        on_gpu = work.scaling.resources.get("GPU", 0) >= 1 and torch.cuda.is_available()
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        loop, config = cloudpickle.loads(work.loop), cloudpickle.loads(work.config)
        engine = Engine(
            self._link,
            device,
            work.failure,
            work.checkpoint,
            code=code_version(loop, work.loop),
            seed=work.seed,
        )
        context = Context(
            engine,
            work.scaling,
            work.checkpoint,
            sync=cloudpickle.loads(work.sync),
            policies=cloudpickle.loads(work.policies),
            seed=work.seed,
            local=self._local,
        )
        stage.context = context
        torch.manual_seed(work.seed)
        if self._rehearse and work.failure.rehearse:
            rehearse(loop, config, context)
            torch.manual_seed(work.seed)
        set_current(context)
        try:
            value = None
            with contextlib.suppress(StopTraining):
                value = call(loop, context, config)
            context.finish()
            if not engine.joined:
                raise RuntimeError("the loop has ended without a step: iterate over ctx.loader()")
            if context.rank == 0:
                self._link.report(returned(self._link.worker, value, engine.store.path))
            self._link.report(
                ev.Returned(
                    0.0,
                    self._link.worker,
                    engine.generation,
                    context.step_number,
                    context.stopped,
                ),
                urgent=True,
            )
        except LeaveTraining as why:
            _log.info("%s", why)
        finally:
            set_current(None)

    def _report_end(self, error: BaseException, stage: _Stage) -> None:
        context = stage.context
        joined = context is not None and context.generation > 0
        if context is not None and _is_out_of_memory(error):
            local = context._settings.local
            self._link.report(
                OutOfMemory(self._link.worker, context.generation, local), urgent=True
            )
            return
        text = "".join(traceback.format_exception(error)).strip()
        why = f"{type(error).__name__}: {error}\n{text[-_TRACE_CHARACTERS:]}"
        _log.error("the loop raised %s", why)
        self._link.report(
            ev.Failed(0.0, self._link.worker, why, "loop" if joined else "start"), urgent=True
        )


class _Stage:
    """The context of a loop, once its start came so far."""

    context: Any = None


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError)
