"""A group of parameter servers: made, found, saved, loaded, resized and stopped as one.

What has to see one moment of all servers (a save, a load, a new number of servers) has them hold back changes
meanwhile, under a lease, so that a program that ends half-way holds up nobody for long.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stoker.api.calls as calls
from stoker.api.remote import remote
from stoker.exceptions import BadRequestError, ConflictError, NotFoundError, StokerError
from stoker_train.parameter_server import directory
from stoker_train.parameter_server.client.routing import Routing, spec_of
from stoker_train.parameter_server.client.tables import DenseTable, SparseTable
from stoker_train.parameter_server.client.worker import Worker, check_worker
from stoker_train.parameter_server.errors import ParameterServerError
from stoker_train.parameter_server.server.actor import COUNTS, ParameterServer
from stoker_train.parameter_server.server.messages import Moved
from stoker_train.parameter_server.storage.initializers import Initializer, Uniform, Zeros
from stoker_train.parameter_server.storage.optimizers import SGD, Optimizer
from stoker_train.parameter_server.storage.spec import TableSpec, check_spec, is_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stoker.runtime.actors.handle import ActorHandle
    from stoker_train.parameter_server.client.tables import Table

_START_S = 120.0
_MOVE_S = 600.0
"""The longest that servers hold back changes for a save, a load or a resize."""
_MOVE_SLACK_S = 60.0


class ParameterServers:
    """The servers of a name. Can be passed to tasks and actors of the job."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._routing = Routing(name)

    def __repr__(self) -> str:
        return f"ParameterServers({self.name!r})"

    def __len__(self) -> int:
        return self._routing.record.servers

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """The actors that are the servers now, by their numbers."""
        return self._routing.servers

    def sparse(
        self,
        name: str,
        width: int,
        *,
        optimizer: Optimizer | None = None,
        initializer: Initializer | None = None,
        dtype: str = "float32",
    ) -> SparseTable:
        """Return a table of rows by int64 key, made unless it is there; ConflictError if it differs.

        ``initializer`` makes a row's first values (uniform within ±0.05 by default), ``optimizer`` steps it
        (``SGD()`` by default).
        """
        spec = TableSpec(
            name=name,
            width=width,
            dtype=str(dtype),
            optimizer=SGD() if optimizer is None else optimizer,
            initializer=Uniform() if initializer is None else initializer,
        )
        return SparseTable(self._declared(spec), self._routing)

    def dense(
        self,
        name: str,
        shape: int | Sequence[int],
        *,
        optimizer: Optimizer | None = None,
        initializer: Initializer | None = None,
        dtype: str = "float32",
    ) -> DenseTable:
        """Return a table that is one array, made unless it is there; ConflictError if it differs."""
        spec = TableSpec(
            name=name,
            shape=(shape,) if isinstance(shape, int) else tuple(shape),
            dtype=str(dtype),
            optimizer=SGD() if optimizer is None else optimizer,
            initializer=Zeros() if initializer is None else initializer,
        )
        return DenseTable(self._declared(spec), self._routing)

    def table(self, name: str) -> Table:
        """Return a table that is there; NotFoundError names those that are."""
        spec = spec_of(self._routing, name)
        if spec.shape is None:
            return SparseTable(spec, self._routing)
        return DenseTable(spec, self._routing)

    def worker(
        self,
        rank: int,
        world: int,
        *,
        mode: str = "sync",
        staleness: int | None = None,
        k: int = 16,
        reduce: str = "mean",
    ) -> Worker:
        """Return this process as worker ``rank`` of ``world``.

        ``mode`` is "sync", "async" or "geo". ``staleness`` bounds how many steps an async worker may be ahead
        of the slowest (None: any number), ``k`` is how many steps are between two exchanges of a geo
        worker, ``reduce`` whether gradients of a sync step are averaged ("mean") or added up ("sum").
        """
        kind = check_worker(rank, world, mode, staleness, k, reduce)
        return Worker(self.name, rank, world, mode=kind, staleness=staleness, k=k, reduce=reduce)

    def save(self, folder: str | Path) -> None:
        """Write all tables, as they are at one moment, in place of an earlier save in ``folder``.

        All nodes of servers, and this one, see the folder. A save that fails leaves the earlier one.
        """
        path = Path(folder).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        aside.mkdir()
        try:
            with self._frozen():
                self._ask("write", str(aside))
            if path.exists():
                old = aside.with_name(f"{aside.name}.old")
                path.rename(old)
                try:
                    aside.rename(path)
                except BaseException:
                    old.rename(path)
                    raise
                shutil.rmtree(old, ignore_errors=True)
            else:
                aside.rename(path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def load(self, folder: str | Path) -> None:
        """Take the tables of a save, of however many servers, in place of those of the same names."""
        with self._frozen():
            self._ask("read", str(Path(folder).absolute()))

    def resize(self, servers: int) -> None:
        """Spread all rows over another number of servers; who pulls or pushes meanwhile waits.

        The servers until now keep their rows until the new ones have saved theirs, and say that rows moved.
        If it fails, all is as before.
        """
        _check_servers(servers)
        began_s = time.monotonic()
        with self._frozen():
            record, old = self._routing.route()
            options: dict[str, Any] = calls.get(
                old[0].__stoker_call__.remote(_own_options), timeout=record.timeout_s
            )
            new = _make(self.name, record.epoch + 1, servers, record.timeout_s, options, old)
            try:
                calls.get([one.fetch.remote() for one in new], timeout=_MOVE_S - _MOVE_SLACK_S)
                if time.monotonic() - began_s > _MOVE_S - _MOVE_SLACK_S:
                    raise ParameterServerError(
                        f"resize() of {self.name} took too long\nall is as before"
                    )
                retired = (*record.retired[-1:], (record.epoch, record.servers))
                directory.write(
                    self.name,
                    directory.Record(
                        epoch=record.epoch + 1,
                        servers=servers,
                        retired=retired[-1:],
                        timeout_s=record.timeout_s,
                    ),
                )
            except BaseException:
                _end(new)
                raise
            calls.get([one.retire.remote() for one in old], timeout=record.timeout_s)
        self._routing.refresh()
        for epoch, count in record.retired:
            _end(_found(self.name, epoch, count))

    def statistics(self) -> dict[str, Any]:
        """Return counts of all servers since their processes began, and what is in each table.

        ``staleness`` says how often a worker went on so many steps ahead of the slowest.
        """
        each = self._routing.ask_all("statistics")
        tables: dict[str, dict[str, Any]] = {}
        for one in each:
            for name, table in one["tables"].items():
                total = tables.setdefault(name, {"kind": table["kind"], "rows": 0, "nbytes": 0})
                total["rows"] += table["rows"]
                total["nbytes"] += table["nbytes"]
        counts: dict[str, Any] = {name: sum(one[name] for one in each) for name in COUNTS}
        return {
            "servers": len(each),
            "pids": [one["pid"] for one in each],
            **counts,
            "tables": tables,
            "staleness": dict(sorted(each[0]["staleness"].items())),
        }

    def stop(self) -> None:
        """End all servers, with all that was not saved to a folder."""
        record = directory.read(self.name)
        if record is None:
            return
        for epoch, count in (*record.retired, (record.epoch, record.servers)):
            _end(_found(self.name, epoch, count))
        directory.delete(self.name)
        self._routing.refresh()

    def _declared(self, spec: TableSpec) -> TableSpec:
        self._routing.ask_all("declare", check_spec(spec))
        return spec

    def _ask(self, method: str, *args: Any) -> None:
        """Call a method of all servers that takes long."""
        calls.get(
            [getattr(one, method).remote(*args) for one in self._routing.servers], timeout=_MOVE_S
        )

    @contextlib.contextmanager
    def _frozen(self) -> Iterator[None]:
        """Have all servers hold back changes, also those that start again meanwhile."""
        holder = uuid.uuid4().hex
        self._routing.refresh()
        record, servers = self._routing.route()
        directory.hold(self.name, record.epoch, holder, _MOVE_S)
        try:
            answers = calls.get(
                [one.freeze.remote(holder) for one in servers], timeout=record.timeout_s
            )
            if any(isinstance(answer, Moved) for answer in answers):
                raise ParameterServerError(
                    f"the rows of {self.name} moved at this moment\nnothing was done: call it again"
                )
            yield
        finally:
            with contextlib.suppress(StokerError):  # else the lease ends
                directory.let_go(self.name, record.epoch, holder)
            for one in servers:
                with contextlib.suppress(StokerError):
                    one.thaw.remote(holder)


def start(
    servers: int = 1,
    *,
    name: str = "default",
    num_cpus: float = 1.0,
    save_interval_s: float | None = 30.0,
    max_restarts: int = -1,
    timeout_s: float = 60.0,
    options: dict[str, Any] | None = None,
) -> ParameterServers:
    """Start parameter servers, and return once they serve.

    Each is an actor that saves its state every ``save_interval_s`` seconds in which it is called (0: before
    each answer) and is started again ``max_restarts`` times with it. ``timeout_s`` bounds the wait for a
    server, and for other workers. ``options`` are further options of the actors. They end with the job, or
    by ``stop()``.

    Raises ConflictError if there are servers of this name.
    """
    _check_servers(servers)
    if not timeout_s > 0:
        raise BadRequestError(
            f"parameter servers have timeout_s={timeout_s!r}\ngive seconds > 0", field="timeout_s"
        )
    record = directory.read(name)
    if record is not None and _found(name, record.epoch, record.servers):
        raise ConflictError(
            f"there are parameter servers named {name!r}\nuse connect(), stop them, or give another name",
            field="name",
        )
    if record is not None:
        directory.delete(name)
    epoch = 1 if record is None else record.epoch + 1
    chosen = {
        "num_cpus": num_cpus,
        "save_interval_s": save_interval_s,
        "max_restarts": max_restarts,
        **(options or {}),
    }
    made = _make(name, epoch, servers, timeout_s, chosen, [])
    try:
        calls.get([one.fetch.remote() for one in made], timeout=_START_S)
        directory.write(name, directory.Record(epoch=epoch, servers=servers, timeout_s=timeout_s))
    except BaseException:
        _end(made)
        raise
    return ParameterServers(name)


def connect(name: str = "default") -> ParameterServers:
    """Return the servers that were started by this name; NotFoundError without any."""
    directory.find(name)
    return ParameterServers(name)


def _check_servers(servers: int) -> None:
    if not is_count(servers, 1):
        raise BadRequestError(
            f"parameter servers are {servers!r}\ngive a whole number of servers", field="servers"
        )


def _make(
    name: str,
    epoch: int,
    servers: int,
    timeout_s: float,
    options: dict[str, Any],
    sources: list[ActorHandle[Any]],
) -> list[ActorHandle[Any]]:
    made: list[ActorHandle[Any]] = []
    try:
        for number in range(servers):
            actor = remote(
                **{
                    "max_task_retries": -1,
                    "max_concurrency": 1000,
                    **options,
                    "name": directory.actor_name(name, epoch, number),
                }
            )(_Server)
            made.append(actor.remote(name, epoch, number, servers, timeout_s, options, sources))
    except BaseException:
        _end(made)
        raise
    return made


class _Server(ParameterServer):
    """A server, with the options of its actor, by which a resize makes more of them."""

    def __init__(
        self,
        name: str,
        epoch: int,
        number: int,
        servers: int,
        timeout_s: float,
        options: dict[str, Any],
        sources: Sequence[ActorHandle[Any]],
    ) -> None:
        super().__init__(name, epoch, number, servers, timeout_s, sources)
        self.options = options


def _own_options(server: _Server) -> dict[str, Any]:
    return server.options


def _found(name: str, epoch: int, servers: int) -> list[ActorHandle[Any]]:
    """Return those actors of a set that live."""
    found = []
    for number in range(servers):
        with contextlib.suppress(NotFoundError):
            found.append(calls.get_actor(directory.actor_name(name, epoch, number)))
    return found


def _end(actors: list[ActorHandle[Any]]) -> None:
    for one in actors:
        with contextlib.suppress(StokerError):
            calls.kill(one)
