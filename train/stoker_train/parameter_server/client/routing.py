"""Requests to the servers of a name: one message for each server, and again for what has moved.

A server that was replaced by ``resize`` answers that its rows have moved, and has changed nothing: what was
for it is then split anew among the servers of now. Used by tables and workers, each client with its own
numbers of pushes; picklable, as the name it goes by.
"""

from __future__ import annotations

import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.api.calls import get, get_actor
from stoker.exceptions import (
    ActorDiedError,
    BadRequestError,
    GetTimeoutError,
    NotFoundError,
    StokerError,
    TaskError,
)
from stoker_train.parameter_server import directory
from stoker_train.parameter_server.errors import (
    ParameterServerError,
    ServerLostError,
    ServerTimeoutError,
)
from stoker_train.parameter_server.server.messages import Moved, Part, Sequence
from stoker_train.parameter_server.storage.keys import dense_bounds, split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stoker.runtime.actors.handle import ActorHandle
    from stoker_train.parameter_server.storage.spec import TableSpec

    Keys = NDArray[np.int64]
    Route = tuple[directory.Record, list[ActorHandle[Any]]]

_SLACK_S = 10.0
"""A server's deadline is so much shorter than its client's: its error, which says more, comes first."""
_MOVES = 20


class Routing:
    """The servers of a name as they are now, and the sequence of this client's pushes."""

    def __init__(self, name: str, client: str = "") -> None:
        self.name = name
        self.client = client or uuid.uuid4().hex
        self.nbytes_sent = self.nbytes_received = 0
        self._number = self._owner = 0
        self._lock = threading.RLock()
        self._servers: list[ActorHandle[Any]] = []
        self._record: directory.Record | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Routing, (self.name,)

    @property
    def record(self) -> directory.Record:
        """The record of the servers, read once, and again when rows have moved."""
        with self._lock:
            if self._record is None:
                record = directory.find(self.name)
                self._servers = [
                    self._server(record.epoch, number) for number in range(record.servers)
                ]
                self._record = record
            return self._record

    @property
    def servers(self) -> list[ActorHandle[Any]]:
        """The actors of now."""
        return self.route()[1]

    def route(self) -> Route:
        """Return the record and its servers: another thread may find others at any time."""
        with self._lock:
            return self.record, list(self._servers)

    def refresh(self) -> None:
        """Forget who the servers are."""
        with self._lock:
            self._record = None

    def ask(
        self, calls: dict[int, tuple[Any, ...]], method: str, route: Route | None = None
    ) -> dict[int, Any]:
        """Call a method of some servers of a route, each with its arguments; a value may be ``Moved``.

        Raises ServerLostError and ServerTimeoutError, which name the server, and what the method raised.
        """
        record, servers = route or self.route()
        refs = {one: getattr(servers[one], method).remote(*args) for one, args in calls.items()}
        deadline_s = time.monotonic() + record.timeout_s + _SLACK_S
        values: dict[int, Any] = {}
        silent: dict[int, GetTimeoutError] = {}
        for number, ref in refs.items():
            try:
                values[number] = get(ref, timeout=max(0.0, deadline_s - time.monotonic()))
            except ActorDiedError as error:
                now = directory.read(self.name)
                if now is None or now.epoch == record.epoch:
                    raise self._lost(number, servers[number].actor_id, error) from error
                values[number] = Moved()
            except GetTimeoutError as error:
                silent[number] = error
            except TaskError as error:
                self.refresh()
                raise (error.cause if isinstance(error.cause, StokerError) else error) from None
        if silent:
            raise self._silent(silent, record.timeout_s)
        return values

    def ask_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all servers, until none has moved."""
        for _ in range(_MOVES):
            route = self.route()
            values = self.ask(dict.fromkeys(range(route[0].servers), args), method, route)
            if not any(isinstance(value, Moved) for value in values.values()):
                return list(values.values())
            self.refresh()
        raise self._restless()

    def resume(self, number: int, owner: int) -> None:
        """Go on behind the push of this number, which an earlier process of this client made."""
        self._number, self._owner = number, owner

    # -- rows ----------------------------------------------------------------------------------------

    def pull(self, spec: TableSpec, keys: Keys, create: bool = True) -> NDArray[Any]:
        """Return (keys, width) rows of keys that are there once each; from one server they are read-only."""
        for _ in range(_MOVES):
            route = self.route()
            count = route[0].servers
            chosen = {}
            calls: dict[int, tuple[Any, ...]] = {0: (spec, keys, create)}
            if count > 1:
                chosen = {one: at for one, at in enumerate(split(keys, count)) if at.size}
                calls = {one: (spec, keys[at], create) for one, at in chosen.items()}
            values = self.ask(calls, "pull", route)
            if any(isinstance(value, Moved) for value in values.values()):
                self.refresh()
                continue
            self.nbytes_sent += keys.nbytes
            self.nbytes_received += sum(value.nbytes for value in values.values())
            if count == 1:
                whole: NDArray[Any] = values[0]
                return whole
            rows = np.empty((keys.size, spec.width), spec.dtype)
            for one, value in values.items():
                rows[chosen[one]] = value
            return rows
        raise self._restless()

    def pull_dense(self, spec: TableSpec) -> NDArray[Any]:
        """Return the flattened array."""
        blocks = self.ask_all("pull", spec, None, True)
        whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        self.nbytes_received += whole.nbytes
        return whole

    def push(self, parts: list[Part], method: str = "push") -> None:
        """Apply parts once each: ``push``, ``add`` or ``assign``; returns when that is done.

        ``keys`` of a part of a dense table are its first element and the one behind its last.
        """
        with self._lock:
            self._number += 1
            number, rest = self._number, parts
            for _ in range(_MOVES):
                record, _ = route = self.route()
                by_server, _ = _split(rest, record.servers)
                sequence = Sequence(self.client, number, record.epoch, self._owner)
                calls = {one: (sequence, some, method) for one, some in by_server.items() if some}
                values = self.ask(calls, "push", route)
                self._count_sent(by_server)
                moved = [one for one, value in values.items() if isinstance(value, Moved)]
                if not moved:
                    return
                rest = [part for one in moved for part in by_server[one]]
                self.refresh()
        raise self._restless()

    def exchange(self, parts: list[Part]) -> list[NDArray[Any]]:
        """Add deltas, and return for each part its rows after that."""
        with self._lock:
            record, _ = route = self.route()
            by_server, places = _split(parts, record.servers)
            sequence = Sequence(self.client, self._number + 1, record.epoch, self._owner)
            calls = {one: (sequence, some, "add", True) for one, some in by_server.items() if some}
            values = self.ask(calls, "push", route)
            self._number += 1
            self._count_sent(by_server)
            moved = [one for one, value in values.items() if isinstance(value, Moved)]
            if moved:
                self.refresh()
                self.push([part for one in moved for part in by_server[one]], "add")
            if moved or not all(values.values()):  # rows that were added to are elsewhere now
                return [self._pull_part(part) for part in parts]
        results = [np.empty_like(part.values) for part in parts]
        for one, rows in values.items():
            for (which, at), found in zip(places[one], rows, strict=True):
                results[which][at] = found
                self.nbytes_received += found.nbytes
        return results

    def step(self, number: int, rank: int, world: int, reduce: str, parts: list[Part]) -> None:
        """Push a worker's part of a step to all servers, and wait until all workers' is applied."""
        rest = parts
        for _ in range(_MOVES):
            record, _ = route = self.route()
            by_server, _ = _split(rest, record.servers)
            sequence = Sequence(self.client, number, record.epoch, self._owner)
            calls = {one: (sequence, rank, world, reduce, some) for one, some in by_server.items()}
            values = self.ask(calls, "step", route)
            self._count_sent(by_server)
            moved = [one for one, value in values.items() if isinstance(value, Moved)]
            if not moved:
                return
            rest = [part for one in moved for part in by_server[one]]
            self.refresh()
        raise self._restless()

    def _pull_part(self, part: Part) -> NDArray[Any]:
        assert part.keys is not None
        if part.spec.shape is None:
            return self.pull(part.spec, part.keys)
        return self.pull_dense(part.spec)[slice(*map(int, part.keys))]

    def _count_sent(self, by_server: dict[int, list[Part]]) -> None:
        self.nbytes_sent += sum(part.nbytes for some in by_server.values() for part in some)

    def _server(self, epoch: int, number: int) -> ActorHandle[Any]:
        try:
            return get_actor(directory.actor_name(self.name, epoch, number))
        except NotFoundError as error:
            raise self._lost(number, "", error) from error

    # -- errors --------------------------------------------------------------------------------------

    def _lost(self, number: int, actor_id: str, error: BaseException) -> ServerLostError:
        return ServerLostError(
            f"parameter server {number} of {self.name} is gone for good\n{error}\n"
            "what was sent to it last may have been applied or not; start servers anew and load() a save",
            extra={"server": number, "actor": actor_id},
        )

    def _silent(self, silent: dict[int, GetTimeoutError], timeout_s: float) -> ServerTimeoutError:
        listed = "\n".join(f"server {number}: {error}" for number, error in silent.items())
        return ServerTimeoutError(
            f"parameter servers of {self.name} did not answer in {timeout_s:g} s\n"
            f"{listed}\nwhat was pushed may have been applied or not; "
            "give start() a longer timeout_s, or see why these are slow (stoker list actors)",
            extra={"servers": list(silent)},
        )

    def _restless(self) -> ParameterServerError:
        return ParameterServerError(
            f"the rows of {self.name} moved {_MOVES} times during one request\n"
            "resize servers less often"
        )


def _split(
    parts: list[Part], count: int
) -> tuple[dict[int, list[Part]], dict[int, list[tuple[int, Any]]]]:
    """Return the parts of parts that each of so many servers has, and where they are in them."""
    by_server: dict[int, list[Part]] = {one: [] for one in range(count)}
    places: dict[int, list[tuple[int, Any]]] = {one: [] for one in range(count)}
    for which, part in enumerate(parts):
        assert part.keys is not None
        if part.spec.shape is not None:
            first, last = map(int, part.keys)
            for one, (start, end) in enumerate(dense_bounds(part.spec.size, count)):
                low, high = max(first, start), min(last, end)
                if low < high:
                    at = slice(low - first, high - first)
                    by_server[one].append(Part(part.spec, np.array([low, high]), part.values[at]))
                    places[one].append((which, at))
        elif count == 1:
            by_server[0].append(part)
            places[0].append((which, slice(None)))
        else:
            for one, chosen in enumerate(split(part.keys, count)):
                if chosen.size:
                    by_server[one].append(Part(part.spec, part.keys[chosen], part.values[chosen]))
                    places[one].append((which, chosen))
    return by_server, places


def spec_of(routing: Routing, table: str) -> TableSpec:
    """Return the specification of a table from its servers; NotFoundError names those that there are."""
    if not isinstance(table, str):
        raise BadRequestError(
            f"a table is given as a {type(table).__name__}\ngive its name, or what sparse() returned",
            field="table",
        )
    spec: TableSpec = routing.ask_all("spec", table)[0]
    return spec
