"""A worker of a training job: it pulls, pushes during a step, and ends the step as its mode says.

========  ======================================================================================
sync      ``step()`` returns when what all workers pushed is applied, as one gradient
async     ``step()`` has it applied at once, and waits while others are more than ``staleness`` behind
geo       pushes step the worker's own rows; each ``k`` steps their change goes to the servers
========  ======================================================================================
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.exceptions import BadRequestError
from stoker_train.parameter_server import directory
from stoker_train.parameter_server.client.replica import DenseReplica, SparseReplica
from stoker_train.parameter_server.client.routing import Routing, spec_of
from stoker_train.parameter_server.client.tables import (
    DenseTable,
    SparseTable,
    dense_part,
    pull_unique,
    sparse_part,
)
from stoker_train.parameter_server.server.messages import Moved, Part
from stoker_train.parameter_server.storage.keys import sum_equal
from stoker_train.parameter_server.storage.spec import is_count

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from numpy.typing import ArrayLike, NDArray

    from stoker_train.parameter_server.client.tables import Table
    from stoker_train.parameter_server.storage.spec import TableSpec


class Mode(StrEnum):
    """The ways in which workers wait for each other."""

    SYNC = "sync"
    ASYNC = "async"
    GEO = "geo"


class Worker:
    """Worker ``rank`` of ``world``. All of them give equal options, and ``close()`` at their end."""

    def __init__(
        self,
        name: str,
        rank: int,
        world: int,
        *,
        mode: Mode,
        staleness: int | None,
        k: int,
        reduce: str,
    ) -> None:
        self.rank, self.world, self.mode = rank, world, mode
        self._name, self._staleness, self._k, self._reduce = name, staleness, k, reduce
        self._routing = Routing(name, f"rank{rank}")
        self._pushed: dict[str, list[Part]] = {}
        self._replicas: dict[str, SparseReplica | DenseReplica] = {}
        self._unanswered: tuple[list[SparseReplica | DenseReplica], list[Part]] = [], []
        """Whose deltas were sent and not answered yet, and these."""
        self._specs: dict[str, TableSpec] = {}
        self._is_closed = self._is_late = False
        directory.set_left(name, rank, has_left=False)
        joined = self._routing.ask_all("join", rank)
        self.steps: int = max(step for step, _ in joined)
        """The number of the last step: it goes on from the workers that are ahead, also after a restart."""
        self._routing.resume(self.steps, max(owner for _, owner in joined))

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of keys and rows that it has sent and received."""
        return self._routing.nbytes_sent, self._routing.nbytes_received

    def pull(self, table: Table | str, keys: ArrayLike | None = None) -> NDArray[Any]:
        """Return rows of a sparse table, or a dense table without ``keys``."""
        spec = self._spec(table, keys)
        if spec.shape is not None:
            return self._pull_dense(spec).reshape(spec.shape)
        return pull_unique(spec, keys, lambda found: self._pull_rows(spec, found))  # type: ignore[arg-type]

    def push(
        self, table: Table | str, keys: ArrayLike | None = None, gradients: ArrayLike | None = None
    ) -> None:
        """Add a copy of gradients to the step; a dense table has no ``keys``. ``step()`` sends them."""
        spec = self._spec(table, keys)
        if gradients is None:
            raise BadRequestError(
                f"push() to table {spec.name!r} has no gradients\ngive gradients=",
                field="gradients",
            )
        part = (
            dense_part(spec, gradients)
            if spec.shape is not None
            else sparse_part(spec, keys, gradients)  # type: ignore[arg-type]
        )
        own = Part(spec, _owned(part.keys, keys), _owned(part.values, gradients))
        self._pushed.setdefault(spec.name, []).append(own)

    def step(self) -> None:
        """End a step: what was pushed is applied as the mode says.

        Raises WorkerTimeoutError that names the workers that were waited for, and ServerLostError. Called
        again after an error in mode sync, it sends the same step again, which is applied once; in mode async
        what was applied is not sent again, and without new pushes it only waits once more.
        """
        if self._is_closed:
            raise BadRequestError(f"worker {self.rank} is closed\nmake another by worker()")
        if self._is_late and not self._pushed:
            self._advance()
            return
        parts = [_joined(some) for some in self._pushed.values()]
        if self.mode is Mode.SYNC:
            self._routing.step(self.steps + 1, self.rank, self.world, self._reduce, parts)
        elif self.mode is Mode.ASYNC:
            if parts:
                self._routing.push(parts)
        else:
            self._step_replicas(parts)
        self._pushed.clear()
        self.steps += 1
        if self.mode is Mode.ASYNC and self._staleness is not None:
            self._advance()
        if self.mode is Mode.GEO and self.steps % self._k == 0:
            self.synchronize()

    def synchronize(self) -> None:
        """In mode GEO: bring the servers what rows moved by since the last time, and go on from theirs.

        What an earlier call failed to bring is sent first, just as it was, so that it counts once.
        """
        self._exchange()
        replicas: list[SparseReplica | DenseReplica] = []
        parts = []
        for replica in self._replicas.values():
            if (part := replica.delta(self.world)) is not None:
                replicas.append(replica)
                parts.append(part)
            else:
                replica.settle(None)
        self._unanswered = replicas, parts
        self._exchange()

    def _exchange(self) -> None:
        replicas, parts = self._unanswered
        if parts:
            for replica, rows in zip(replicas, self._routing.exchange(parts), strict=True):
                replica.settle(rows)
        self._unanswered = [], []

    def close(self) -> None:
        """End: in mode GEO the last steps are sent; nobody waits for this worker any more."""
        if self._is_closed:
            return
        if self.mode is Mode.GEO:
            self.synchronize()
        directory.set_left(self._name, self.rank, has_left=True)
        if all(self._routing.ask_all("leave", self.rank, self.world, self._reduce)):
            directory.forget_left(self._name)
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def _spec(self, table: Table | str, keys: ArrayLike | None) -> TableSpec:
        if isinstance(table, (SparseTable, DenseTable)):
            spec = table.spec
        elif table in self._specs:
            spec = self._specs[table]
        else:
            spec = self._specs[table] = spec_of(self._routing, table)
        if (keys is None) != (spec.shape is not None):
            fix = "give keys" if keys is None else "leave keys out"
            raise BadRequestError(f"table {spec.name!r} is {spec.kind}\n{fix}", field="keys")
        return spec

    def _pull_rows(self, spec: TableSpec, keys: NDArray[np.int64]) -> NDArray[Any]:
        if self.mode is not Mode.GEO:
            return self._routing.pull(spec, keys)
        return self._sparse(spec).pull(keys, lambda old: self._routing.pull(spec, old))

    def _pull_dense(self, spec: TableSpec) -> NDArray[Any]:
        if self.mode is not Mode.GEO:
            return self._routing.pull_dense(spec)
        return self._dense(spec).pull(lambda: self._routing.pull_dense(spec))

    def _step_replicas(self, parts: list[Part]) -> None:
        for part in parts:
            spec = part.spec
            if spec.shape is None:
                self._sparse(spec).push(part, lambda old, one=spec: self._routing.pull(one, old))  # type: ignore[misc]
            else:
                self._dense(spec).push(part, lambda one=spec: self._routing.pull_dense(one))  # type: ignore[misc]

    def _sparse(self, spec: TableSpec) -> SparseReplica:
        found = self._replicas.setdefault(spec.name, SparseReplica(spec))
        assert isinstance(found, SparseReplica)
        return found

    def _dense(self, spec: TableSpec) -> DenseReplica:
        found = self._replicas.get(spec.name)
        if found is None:
            found = self._replicas[spec.name] = DenseReplica(spec)
        assert isinstance(found, DenseReplica)
        return found

    def _advance(self) -> None:
        """Wait for the slowest worker, at server 0."""
        self._is_late = True
        while True:
            args = (self.rank, self.world, self.steps, self._staleness)
            (ahead,) = self._routing.ask({0: args}, "advance").values()
            if not isinstance(ahead, Moved):
                self._is_late = False
                return
            self._routing.refresh()


def _owned(made: Any, given: Any) -> Any:
    """Return the array, or a copy if it is memory of the caller's, who may write there before the step."""
    if made is None or given is None or not np.may_share_memory(made, np.asarray(given)):
        return made
    return made.copy()


def _joined(parts: list[Part]) -> Part:
    """Return the sum of what was pushed to one table."""
    if len(parts) == 1:
        return parts[0]
    spec, keys = parts[0].spec, parts[0].keys
    if spec.shape is not None:
        return Part(spec, keys, np.sum([part.values for part in parts], axis=0))
    return Part(
        spec,
        *sum_equal(
            np.concatenate([part.keys for part in parts if part.keys is not None]),
            np.concatenate([part.values for part in parts]),
        ),
    )


def check_worker(
    rank: int, world: int, mode: str, staleness: int | None, k: int, reduce: str
) -> Mode:
    """Return the mode, or raise BadRequestError that names the field at fault."""
    if not is_count(world, 1):
        raise BadRequestError(f"there are {world!r} workers\ngive world >= 1", field="world")
    if not is_count(rank, 0) or rank >= world:
        raise BadRequestError(
            f"a worker has the rank {rank!r} of {world}\ngive 0 to {world - 1}", field="rank"
        )
    if mode not in list(Mode):
        raise BadRequestError(
            f"a worker has the mode {mode!r}\ngive one of {', '.join(Mode)}", field="mode"
        )
    if staleness is not None and not is_count(staleness, 0):
        raise BadRequestError(
            f"a worker has the staleness {staleness!r}\ngive steps >= 0, or None for no bound",
            field="staleness",
        )
    if not is_count(k, 1):
        raise BadRequestError(f"a worker has k={k!r}\ngive steps >= 1", field="k")
    if reduce not in ("mean", "sum"):
        raise BadRequestError(
            f"a worker has reduce={reduce!r}\ngive 'mean' or 'sum'", field="reduce"
        )
    return Mode(mode)
