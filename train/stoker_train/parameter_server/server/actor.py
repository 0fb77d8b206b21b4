"""The actor that is a parameter server: it has its part of all tables, and restarts from what it saved.

Its methods are coroutines of one event loop; what changes rows has no await within, so each message is
applied whole. Saves are those of actors (``__stoker_save__``), and have the numbers of the pushes that are in
their rows, so that a push that is sent again is applied once. Made and called by
:mod:`stoker_train.parameter_server.client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.api.actors import exit_actor
from stoker.api.arrays import empty
from stoker.api.calls import get_actor
from stoker.exceptions import ActorDiedError, NotFoundError, StokerError
from stoker.runtime import current
from stoker_train.parameter_server import directory
from stoker_train.parameter_server.errors import ParameterServerError
from stoker_train.parameter_server.server.barriers import StalenessGate, StepBarrier
from stoker_train.parameter_server.server.messages import Moved, Part, Sequence
from stoker_train.parameter_server.server.tables import Tables, pack_spec, unpack_spec
from stoker_train.parameter_server.storage.keys import server_of
from stoker_wire.messages.work import Actor

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from numpy.typing import NDArray

    from stoker.runtime.actors.handle import ActorHandle
    from stoker_train.parameter_server.storage.spec import TableSpec

_MOVED = Moved()
_LOOK_S = 2.0
"""The pause after which a server that holds back changes finds out whether its rows have moved."""


class ParameterServer:
    """Server ``number`` of ``servers`` of the set ``epoch``; ``sources`` are those of the set before."""

    def __init__(
        self,
        name: str,
        epoch: int,
        number: int,
        servers: int,
        timeout_s: float,
        sources: Many[ActorHandle[Any]] = (),
    ) -> None:
        self._name, self._epoch, self._number, self._servers = name, epoch, number, servers
        self._timeout_s = timeout_s
        self._sources = list(sources)
        self._tables = Tables(number, servers)
        self._barrier, self._gate = StepBarrier(name), StalenessGate(name)
        self._is_ready = False
        self._starting = asyncio.Lock()
        self._has_restored = self._has_saved_before = False
        self._is_retired = self._is_blind = False
        self._owners: dict[str, int] = {}
        self._holders: set[str] = set()
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._released: set[int] = set()
        self._finals: dict[int, dict[str, Any]] = {}
        self._own_final: dict[str, Any] | None = None

    # -- rows ----------------------------------------------------------------------------------------

    async def declare(self, spec: TableSpec) -> Moved | None:
        """Make a table, or check that it is the same as the one that is there."""
        if not await self._enter(changes=True):
            return _MOVED
        self._tables.shard(spec)
        return None

    async def spec(self, table: str) -> TableSpec | Moved:
        """Return the specification of a table."""
        return self._tables.spec(table) if await self._enter() else _MOVED

    async def pull(
        self, spec: TableSpec, keys: NDArray[np.int64] | None, create: bool
    ) -> NDArray[Any] | Moved:
        """Return rows by key, or this server's block of a dense table."""
        if not await self._enter():
            return _MOVED
        return self._tables.pull(spec, keys, time.time(), create, empty)

    async def push(
        self,
        sequence: Sequence,
        parts: list[Part],
        method: str = "push",
        returns_rows: bool = False,
    ) -> list[NDArray[Any]] | Moved:
        """Apply values once, and return the rows that they changed if asked to, and if they are here."""
        if not await self._enter(changes=True):
            return (
                [] if await self._was_applied("seen", sequence.client, sequence.order) else _MOVED
            )
        self._check_owner(sequence)
        self._tables.check(parts)
        now_s = time.time()
        if self._tables.is_new(sequence.client, sequence.order):
            self._tables.push(parts, now_s, method)
        if not returns_rows:
            return []
        return [self._tables.pull(one.spec, one.keys, now_s, True, empty) for one in parts]

    async def step(
        self, sequence: Sequence, rank: int, world: int, reduce: str, parts: list[Part]
    ) -> bool | Moved:
        """Apply what all ranks push at a step; False if it is lost with a server that restarted."""
        if not await self._enter(changes=True):
            return await self._was_applied("applied", rank, sequence.order) or _MOVED
        self._check_owner(sequence)
        self._tables.check(parts)

        def apply(by_rank: list[list[Part]]) -> None:
            self._tables.push_of_ranks(by_rank, time.time(), reduce, Part)

        is_applied = await self._barrier.push(
            rank, world, sequence.order, parts, apply, self._timeout_s
        )
        if is_applied is None:
            return _MOVED
        if not is_applied:
            self._tables.counts["lost"] += 1
        return is_applied

    # -- workers -------------------------------------------------------------------------------------

    async def advance(self, rank: int, world: int, step: int, bound: int) -> int | Moved:
        """Return by how many steps the rank is ahead of the slowest, once that is within the bound."""
        if not await self._enter(changes=True):
            return _MOVED
        ahead = await self._gate.advance(rank, world, step, bound, self._timeout_s)
        return _MOVED if ahead is None else ahead

    async def join(self, rank: int) -> tuple[int, int] | Moved:
        """Return the last step that any rank is at, from which this one goes on, and the owner's number."""
        if not await self._enter(changes=True):
            return _MOVED
        self._barrier.left.discard(rank)
        self._gate.left.discard(rank)
        step = self._gate.steps[rank] = self._last_step()
        client = f"rank{rank}"
        owner = self._owners[client] = self._owners.get(client, 0) + 1
        return step, owner

    async def leave(self, rank: int, world: int, reduce: str) -> bool | Moved:
        """Wait for a rank no more; return whether it was the last, so that another job may begin."""
        if not await self._enter(changes=True):
            return _MOVED

        def apply(by_rank: list[list[Part]]) -> None:
            self._tables.push_of_ranks(by_rank, time.time(), reduce, Part)

        self._barrier.leave(rank, world, apply)
        await self._gate.leave(rank)
        if not self._barrier.left.issuperset(range(world)):
            return False
        self._barrier.left.clear()
        self._gate.left.clear()
        self._gate.steps = dict.fromkeys(self._gate.steps, self._last_step())
        return True

    # -- what is done with all servers together ----------------------------------------------------------

    async def freeze(self, holder: str) -> Moved | None:
        """Have all that changes rows wait while the directory names the holder; pulls go on."""
        await self._ready()
        if self._is_retired:
            return _MOVED
        self._holders.add(holder)
        self._thawed.clear()
        return None

    async def thaw(self, holder: str) -> None:
        """Go on, unless there is another holder; or say that rows have moved, if they have."""
        await self._ready()
        await self._look_up()
        self._let_go({holder})

    async def retire(self) -> None:
        """Answer from now on that rows have moved."""
        self._is_retired = True
        self._thawed.set()
        self._barrier.move()
        await self._gate.move()

    async def extract(self, number: int, servers: int) -> dict[str, Any]:
        """Return what server ``number`` of the next set of ``servers`` begins with."""
        await self._ready()
        return {
            "exports": self._tables.export(number, servers),
            "seen": dict(self._tables.seen),
            "applied": dict(self._barrier.applied),
            "steps": dict(self._gate.steps),
            "owners": dict(self._owners),
            "left": set(self._barrier.left),
            "histogram": dict(self._gate.histogram) if number == 0 else {},
        }

    async def final(self, number: int) -> dict[str, Any] | None:
        """Return the pushes that server ``number`` of the set before had applied when its rows moved."""
        await self._ready()
        return self._finals.get(number)

    async def fetch(self) -> None:
        """Return once it has its rows."""
        await self._ready()

    async def release(self, number: int, servers: int) -> bool:
        """End this actor once all servers of the next set have saved their rows; False: not moved yet."""
        await self._ready()
        if not self._is_retired:
            return False
        self._released.add(number)
        if len(self._released) == servers:
            exit_actor()
        return True

    async def write(self, folder: str) -> int:
        """Write all rows to files in a folder that is there; return their bytes."""
        await self._ready()
        total = 0
        for number, (spec, arrays) in enumerate(self._tables.export()):
            path = Path(folder, f"server{self._number}-table{number}.npz")
            total += await asyncio.to_thread(_write_file, path, spec, arrays)
        return total

    async def read(self, folder: str) -> None:
        """Take the rows that belong here from a save, in place of those that the same tables have."""
        await self._ready()
        paths = await asyncio.to_thread(_files, folder)
        if not paths:
            raise NotFoundError(
                f"there is no save of parameter servers in {folder}\n"
                "give a folder that save() made, on a file system that all nodes of servers see",
                field="folder",
            )
        exports = [await asyncio.to_thread(self._read_file, path) for path in paths]
        self._tables.absorb(exports, replace=True)

    async def shrink(
        self, table: str, unused_s: float | None, max_norm: float | None
    ) -> int | Moved:
        """Drop rows of a sparse table; return how many."""
        if not await self._enter(changes=True):
            return _MOVED
        self._tables.spec(table)
        since_s = None if unused_s is None else time.time() - unused_s
        shard: Any = self._tables.shards[table]
        dropped: int = shard.shrink(unused_since_s=since_s, max_norm=max_norm)
        return dropped

    async def statistics(self) -> dict[str, Any] | Moved:
        """Return counts since this process began, tables, and the histogram of staleness."""
        if not await self._enter():
            return _MOVED
        return {
            **{name: self._tables.counts[name] for name in COUNTS},
            "pid": os.getpid(),
            "tables": self._tables.statistics(),
            "staleness": dict(self._gate.histogram),
        }

    # -- its state -----------------------------------------------------------------------------------

    async def __stoker_save__(self) -> dict[str, Any]:
        """Return a copy of all that a server that starts again goes on with."""
        await self._ready()  # a save of a part of its rows would be taken for all
        await self._release_sources()
        self._has_saved_before = True
        return {
            "exports": self._tables.export(),
            "seen": dict(self._tables.seen),
            "applied": dict(self._barrier.applied),
            "steps": dict(self._gate.steps),
            "owners": dict(self._owners),
            "left": set(self._barrier.left),
            "histogram": dict(self._gate.histogram),
            "is_retired": self._is_retired,
            "finals": self._finals,
        }

    def __stoker_restore__(self, state: dict[str, Any]) -> None:
        """Go on with a saved state."""
        self._has_restored = True
        self._finals = state["finals"]
        self._is_retired = self._is_blind = state["is_retired"]
        self._take(state)

    # -- internal ------------------------------------------------------------------------------------

    async def _enter(self, *, changes: bool = False) -> bool:
        """Return whether this server has the rows, once it may change them."""
        await self._ready()
        while changes and not self._thawed.is_set():
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._thawed.wait()
            except TimeoutError:  # whoever froze it may have ended
                await self._look_up()
        return not self._is_retired

    async def _ready(self) -> None:
        if not self._is_ready:
            async with self._starting:
                await self._begin()

    async def _begin(self) -> None:
        """Find out who this is, and take its rows from the servers before, once."""
        if self._is_ready:
            return
        await self._look_up()
        if not self._is_retired:  # a save or a resize may have begun before this process
            self._holders |= await asyncio.to_thread(directory.holders, self._name, self._epoch)
            if self._holders:
                self._thawed.clear()
        for rank in await asyncio.to_thread(directory.left_ranks, self._name):
            self._barrier.left.add(rank)
            self._gate.left.add(rank)
        if not self._has_restored and not self._is_retired:
            for number, source in enumerate(self._sources):
                state = await source.extract.remote(self._number, self._servers)
                self._finals[number] = {name: dict(state[name]) for name in ("seen", "applied")}
                self._take(state)
        self._is_ready = True

    async def _look_up(self) -> None:
        """Retire if the rows have moved, else let go of holders that have ended."""
        before = set(self._holders)
        held = await asyncio.to_thread(directory.holders, self._name, self._epoch)
        record = await asyncio.to_thread(directory.read, self._name)
        if record is not None and record.epoch > self._epoch and not self._is_retired:
            self._is_blind = True
            await self.retire()
        self._let_go(before - held)

    def _let_go(self, holders: set[str]) -> None:
        self._holders -= holders
        if not self._holders:
            self._thawed.set()

    def _check_owner(self, sequence: Sequence) -> None:
        """Note which process is the worker; ParameterServerError for one in whose place another has come."""
        owner = self._owners.get(sequence.client, 0)
        if sequence.owner < owner:
            raise ParameterServerError(
                f"{sequence.client} of the workers of {self._name} is another process now\n"
                "what this one pushes is not applied: end it, or give each worker a rank of its own"
            )
        if sequence.owner > owner:
            self._owners[sequence.client] = sequence.owner

    def _take(self, state: dict[str, Any]) -> None:
        """Take a saved state, or the part of one of several sources."""
        self._tables.absorb(state["exports"])
        for mine, given in (
            (self._tables.seen, state["seen"]),
            (self._barrier.applied, state["applied"]),
            (self._gate.steps, state["steps"]),
            (self._owners, state["owners"]),
        ):
            for name, order in given.items():
                mine[name] = max(order, mine.get(name, 0))
        self._barrier.left |= state["left"]
        self._gate.left |= state["left"]
        self._gate.histogram.update(state["histogram"])

    def _last_step(self) -> int:
        """Return the number of the last step, or push, of any rank."""
        pushed = [order for one, order in self._tables.seen.items() if one.startswith("rank")]
        orders = map(Sequence.number_of, (*self._barrier.applied.values(), *pushed))
        return max((*orders, *self._gate.steps.values()), default=0)

    async def _was_applied(self, kind: str, who: str | int, order: int) -> bool:
        """Return whether a push was applied here before rows moved.

        A server that restarted since has that from one of the next set; ParameterServerError if that is gone.
        """
        if not self._is_blind:
            mine: Any = self._tables.seen if kind == "seen" else self._barrier.applied
            known: bool = order <= mine.get(who, -1)  # its answer may not have come there
            return known
        if self._own_final is None:
            try:
                name = directory.actor_name(self._name, self._epoch + 1, 0)
                heir = await asyncio.to_thread(get_actor, name)
                self._own_final = await heir.final.remote(self._number)
            except (NotFoundError, ActorDiedError):
                pass
        if self._own_final is None:
            raise ParameterServerError(
                f"server {self._number} of {self._name} was restarted as its rows moved\n"
                "this push may have been applied, and is not sent again: go on, or load a save"
            )
        applied: bool = order <= self._own_final[kind].get(who, -1)
        return applied

    async def _release_sources(self) -> None:
        """Tell the servers before that their rows are saved here, from the second save on."""
        if not self._sources or not (self._has_saved_before or self._has_restored):
            return
        if not self._has_restored:
            runtime = current.runtime()
            assert runtime.job.actor is not None
            path = f"/v1/actors/{runtime.job.actor.actor_id}"
            record = await asyncio.to_thread(runtime.job.http.call, "GET", path, reply=Actor)
            if record.saved_at_s is None:
                return
        for source in list(self._sources):
            is_told = True
            with contextlib.suppress(StokerError):  # it ends
                is_told = await source.release.remote(self._number, self._servers)
            if is_told:
                self._sources.remove(source)

    def _read_file(self, path: Path) -> tuple[TableSpec, dict[str, NDArray[Any]]]:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        spec = unpack_spec(arrays.pop("spec"))
        if spec.shape is None:
            here = server_of(arrays["keys"], self._servers) == self._number
            arrays = {name: array[here] for name, array in arrays.items()}
        return spec, arrays


COUNTS = (
    "pulls",
    "pushes",
    "rows_pulled",
    "rows_pushed",
    "bytes_in",
    "bytes_out",
    "duplicates",
    "lost",
)


def _write_file(path: Path, spec: TableSpec, arrays: dict[str, NDArray[Any]]) -> int:
    contents: dict[str, Any] = {"spec": pack_spec(spec), **arrays}
    np.savez(path, **contents)
    return path.stat().st_size


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("server*-table*.npz"))
