"""The context of the replica that runs in this thread, for libraries that are not handed it.

The replica's actor sets it in the loop's thread; Horovod-style loops and collectives read it. This module
holds no other state, and knows the context by what it asks of it only.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

from stoker.exceptions import ConflictError

__all__ = ("ReplicaContext", "current", "set_current")


class ReplicaContext(Protocol):
    """The replica, as a library in the loop's thread sees it.

    The last five are for loops that end their steps otherwise than by ``ctx.step``. All but ``state`` are
    called by every rank, in the same order.
    """

    @property
    def rank(self) -> int:
        """This replica's rank in the present generation."""

    @property
    def world_size(self) -> int:
        """The replicas of the present generation."""

    @property
    def generation(self) -> int:
        """The number of the present generation."""

    @property
    def device(self) -> Any:
        """The ``torch.device`` of this replica."""

    def state(self, **objects: Any) -> Any:
        """Return a ``TrainState`` of objects, which the replica commits, checkpoints and syncs."""

    def join(self) -> None:
        """Say that this replica is ready; come back once it is in a group, with the state of all."""

    def record_samples(
        self, epoch: int, first: int, count: int, length: int, batch: int, lr: float
    ) -> None:
        """Add an entry to the ledger, which the next commit makes stand; see ``core.ledger.Entry``."""

    def commit(self) -> bool:
        """End a step: commit the state in memory, and apply what the controller ordered.

        Returns whether the membership has changed; then the group is the new one, and the state that of all.
        """

    def check_orders(self) -> bool:
        """Do as :meth:`commit`, but commit nothing."""

    def recover(self, error: BaseException) -> None:
        """Come back at the last commit, in the next generation, if ``error`` came of a lost member."""


_context: ContextVar[ReplicaContext | None] = ContextVar("stoker_replica_context", default=None)


def set_current(context: ReplicaContext | None) -> None:
    """Set the context of this thread; None when its loop has ended."""
    _context.set(context)


def current() -> Any:
    """Return the context of this thread's replica. ConflictError outside a loop of an ElasticTrainer."""
    context = _context.get()
    if context is None:
        raise ConflictError(
            "this thread runs no loop of an elastic trainer\n"
            "call it in the loop given to stoker.train.ElasticTrainer, in the thread that runs it"
        )
    return context
