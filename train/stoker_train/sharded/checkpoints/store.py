"""``ShardedCheckpoints``: a rank's side of the checkpoints of a sharded job.

Called by the trainer and by loops that have none. What a checkpoint is, is said in ``layout``; how it is
written and read, in ``saving`` and ``loading``; who may write, in ``claims``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.exceptions import (
    BadRequestError,
    ConflictError,
    DeadlineExceededError,
    FencedError,
    NotFoundError,
)
from stoker_train.sharded.checkpoints import claims, layout
from stoker_train.sharded.checkpoints.layout import Claim, Stored
from stoker_train.sharded.checkpoints.loading import Loaded, load_into
from stoker_train.sharded.checkpoints.ranks import Ranks
from stoker_train.sharded.checkpoints.saving import Order, Saved, write
from stoker_train.sharded.checkpoints.staging import Staging
from stoker_train.sharded.checkpoints.state import State

if TYPE_CHECKING:
    import os

__all__ = ("NO_AGREEMENT", "Loaded", "Saved", "ShardedCheckpoints", "Stored")

_log = logging.getLogger(__name__)
NO_AGREEMENT = "the ranks cannot agree"
"""The beginning of a problem that is another rank's end."""


class ShardedCheckpoints:
    """A folder of checkpoints that all ranks of a gang write together, and any other gang reads.

    Made on every rank at the same place, after the process group if there is one; the folder is on a file
    system that all nodes share. ``keep`` checkpoints stay, and never fewer than two, of which the older is
    there while one more is written. ``attempt``: the number of the gang, which grows
    with each that replaces another; ``owner``: whose gangs these are, as a job's id. From attempt 1 on, a
    gang takes the folder over when it loads or first saves, and one that was replaced adds nothing to it any
    more. Attempt 0 takes it over when it first saves. Every wait ends after ``timeout_s``. ``group``: the
    ranks that save together, if not all.

    BadRequestError for ``keep`` below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 3,
        attempt: int = 0,
        *,
        owner: str = "",
        timeout_s: float = 1800.0,
        group: Any = None,
    ) -> None:
        if keep < 1:
            raise BadRequestError(
                f"keep={keep} of ShardedCheckpoints() keeps none\ngive 1 or more", field="keep"
            )
        self.folder, self.keep, self.attempt, self.owner = Path(folder), keep, attempt, owner
        self._timeout_s = timeout_s
        self._ranks = Ranks(timeout_s, group)
        self._all = group is None
        self._staging = Staging()
        self._claim: Claim | None = None
        self._number = 0
        self._flight: Future[Saved] | None = None
        self._flight_step = 0
        self._last: Saved | None = None
        self.blocked_s = 0.0
        """How long the last save held the training up, in seconds."""

    @property
    def problem(self) -> str:
        """The reason that the last checkpoint could not be written; empty if it was."""
        flight = self._flight
        last = flight.result() if flight is not None and flight.done() else self._last
        return last.problem if last is not None else ""

    def save(
        self, step: int, state: Mapping[str, Any], *, meta: Mapping[str, Any] | None = None
    ) -> Future[Saved]:
        """Copy the state of ``step``, and have it written beside the caller; the future never fails.

        Called on all ranks. ``state``: ``{"model": module or its parts, "optimizer": optimizer}``, anything
        with ``state_dict``, and plain values, which are taken from rank 0; ``per_rank`` is each rank's own.
        ``meta``: what a listing shows, as JSON has it (``plan``). Waits for the save before.

        BadRequestError for a state that cannot be kept, FencedError once another gang has taken over,
        DeadlineExceededError where the save before has no end.
        """
        began = time.monotonic()
        self.wait()
        if self._last is not None and self._last.fenced:
            raise FencedError(self._last.problem)
        self._number += 1
        order = Order(step, self.folder, dict(meta or {}), [], {}, None, self._number, self.keep)
        failure: Exception | None = None
        try:
            if self._ranks.rank == 0:
                order = replace(order, claim=self._claimed())
            parts = State(state).take(self._ranks.rank, once=self._all)
            order = replace(order, pieces=self._staging.copy(parts.pieces), plain=parts.plain)
        except Exception as error:
            failure = error
            order = replace(
                order,
                error=str(error) or type(error).__name__,
                fenced=isinstance(error, FencedError),
            )
        future: Future[Saved] = Future()
        self._flight, self._flight_step = future, step
        threading.Thread(
            target=self._write, args=(order, future), name="sharded-checkpoint", daemon=True
        ).start()
        self.blocked_s = time.monotonic() - began
        if failure is not None:
            raise failure
        return future

    def wait(self, timeout_s: float | None = None) -> Saved | None:
        """Wait for the save that is under way; returns the outcome of the last, None if there was none.

        DeadlineExceededError where it takes longer than ``timeout_s``.
        """
        flight = self._flight
        if flight is None:
            return self._last
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            self._last = flight.result(limit)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the checkpoint of step {self._flight_step} was not written within {limit:g} s\n"
                f"save less often, or see why {self.folder} is slow"
            ) from None
        self._flight = None
        return self._last

    def stored(self) -> list[Stored]:
        """Return the checkpoints that count, the oldest first, as this rank sees the folder."""
        return layout.checkpoints_in(self.folder)

    def newest(self) -> int | None:
        """Return the step of the newest checkpoint, None if there is none; its files are not read."""
        found = self.stored()
        return found[-1].step if found else None

    def load(
        self, into: Mapping[str, Any], *, step: int | None = None, strict: bool = True
    ) -> Loaded | None:
        """Load the newest whole checkpoint, or that of ``step``; None if there is none yet.

        Called on all ranks, which may be of any other number and plan. ``into`` is as the state of
        :meth:`save`: modules, optimizers and what has ``load_state_dict`` are filled, plain values are in
        what is returned. A damaged checkpoint is said in the log, and the one before it is used.
        ``strict``: the model has all that the checkpoint has, and nothing else.

        BadRequestError for a state that differs or if all are damaged, NotFoundError for a step that is not
        there, ConflictError for a folder that not all ranks see, FencedError where a later gang has it.
        """
        self.wait()
        ranks = self._ranks
        problem: Exception | None = None
        found: list[Stored] = []
        if ranks.rank == 0:
            try:
                if self.attempt:
                    self._claimed()
                found = [one for one in self.stored() if step in (None, one.step)]
            except Exception as error:
                problem = error
        problem, found = ranks.broadcast((problem, found))
        if problem is not None:
            raise problem
        damaged = []
        for stored in reversed(found):
            what = self._verify(stored)
            if not what:
                return load_into(stored, dict(into), ranks, strict=strict)
            damaged.append(f"{stored.path.name}: {what}")
            if ranks.rank == 0:
                _log.warning(
                    "checkpoint %s in %s is passed over: %s; the one before it is used",
                    stored.path.name,
                    self.folder,
                    what,
                )
        if damaged:
            raise BadRequestError(
                f"no checkpoint in {self.folder} is whole: {damaged[0]}\n"
                "restore the file, or give another folder to begin anew",
                field="folder",
            )
        if step is not None:
            raise NotFoundError(
                f"folder {self.folder} has no checkpoint of step {step}\n"
                "see `stoker train checkpoints` for those that it has",
                field="step",
            )
        return None

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the save that is under way, and end; called on all ranks."""
        self.wait(timeout_s)
        self._ranks.close()

    def _claimed(self) -> Claim:
        if self._claim is None:
            self._claim = claims.take(self.folder, self.owner, self.attempt)
        return self._claim

    def _verify(self, stored: Stored) -> str:
        """Return what is wrong with a checkpoint; the ranks share its files, the largest first."""
        ranks = self._ranks
        files = stored.manifest.files
        names = sorted(files, key=lambda name: (-files[name][0], name))
        seen = (stored.path / layout.MANIFEST).exists()
        what = layout.verify(stored, names[ranks.rank :: ranks.size]) if seen else ""
        found = ranks.all_gather((seen, what))
        blind = [rank for rank, (sees, _) in enumerate(found) if not sees]
        if blind and len(blind) < ranks.size:
            raise ConflictError(
                f"rank {blind[0]} does not see {stored.path}, and others do\n"
                "give a folder on a file system that all nodes share",
            )
        return next((one for _, one in found if one), "" if seen else "it was removed")

    def _write(self, order: Order, future: Future[Saved]) -> None:
        try:
            self._staging.settle()
        except Exception as error:
            order = replace(order, error=f"the copy to the host failed: {error}")
        try:
            saved = write(order, self._ranks)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            saved = Saved(order.step, problem=f"{NO_AGREEMENT}: {what}")
        if saved.problem and self._ranks.rank == 0:
            _log.error(
                "the checkpoint of step %d is not in %s: %s; the one before stays",
                order.step,
                self.folder,
                saved.problem,
            )
        future.set_result(saved)
