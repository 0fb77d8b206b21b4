"""The actor that is a rank: it runs the loop in a thread of its own, and tells the controller.

The controller starts one per rank of a gang (:mod:`stoker_train.sharded.controller.gang`). An actor is of
one gang only: a gang that has lost a rank is ended as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import stoker
from stoker.exceptions import DeadlineExceededError, FencedError, UnavailableError
from stoker_train.elastic.replica.link import Link
from stoker_train.elastic.replica.rehearsal import invoke
from stoker_train.elastic.replica.returned import returned
from stoker_train.sharded.rank.reports import Failed, Ready, Returned

if TYPE_CHECKING:
    from stoker_train.sharded.rank.work import Work

__all__ = ("Rank",)

_log = logging.getLogger(__name__)
_TRACE_CHARACTERS = 4000
_OF_GROUPS = ("gloo", "NCCL", "nccl", "Connection closed by peer", "TCPStore")
"""What stands in the errors of torch's process groups, many of which are a plain RuntimeError."""


class Rank:
    """Rank ``rank`` of gang ``gang``, which is the fence of what it writes."""

    def __init__(self, work: Work, rank: int, gang: int) -> None:
        self._work, self._rank, self._gang = work, rank, gang
        self._link = Link(rank)
        self._asked: set[str] = set()

    def reports(self) -> Iterator[list[Any]]:
        """Run the loop, and yield what it reports until it has ended; several at a time."""
        where = stoker.get_runtime_context()
        self._link.report(
            Ready(self._rank, self._gang, where.node_id, tuple(where.gpu_ids), os.getpid()),
            urgent=True,
        )
        threading.Thread(target=self._run, name="loop", daemon=True).start()
        while (reports := self._link.drain()) is not None:
            yield reports

    def ask(self, what: str) -> None:
        """Take what the user asks for: ``"checkpoint"`` or ``"stop"``, at a step that all ranks agree on."""
        self._asked.add(what)

    def _run(self) -> None:
        from stoker_train.sharded.rank.context import Context

        context: Context | None = None
        try:
            sys.path += [one for one in self._work.search_path if one not in sys.path]
            context = Context(self._work, self._rank, self._gang, self._link, self._asked)
            self._loop(context)
        except BaseException as error:
            where = context.activity if context is not None else "its start"
            self._report_end(error, where)

    def _loop(self, context: Any) -> None:
        import cloudpickle

        from stoker_train.sharded.rank.context import StopTraining

        spec = self._work.spec
        context.open()
        value = None
        with contextlib.suppress(StopTraining):
            value = invoke(cloudpickle.loads(spec.loop), context, cloudpickle.loads(spec.config))
        context.finish()
        if self._rank == 0:
            self._link.report(returned(0, value, context.folder))
        self._link.report(
            Returned(self._rank, self._gang, context.step_number, context.stopped), urgent=True
        )

    def _report_end(self, error: BaseException, where: str) -> None:
        trace = "".join(traceback.format_exception(error)).strip()[-_TRACE_CHARACTERS:]
        _log.error("rank %d, in %s: %s", self._rank, where, trace)
        # Of this job's gangs only the newest is heard: it was another job's that took over.
        kind = "lost" if is_of_others(error) else "loop"
        if isinstance(error, FencedError) and "checkpoint" in where:
            kind = "fenced"
        text = f"{type(error).__name__}: {error}".strip()
        self._link.report(Failed(self._rank, self._gang, kind, text, where, trace), urgent=True)


def is_of_others(error: BaseException) -> bool:
    """Return whether an error says that another rank did not come: it is not this loop's own."""
    if isinstance(error, DeadlineExceededError | UnavailableError | FencedError):
        return True
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    if error.__cause__ is not None and is_of_others(error.__cause__):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(one in text for one in _OF_GROUPS)
