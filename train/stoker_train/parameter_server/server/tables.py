"""All tables of one server: what a message changes, in one go, and what is saved, moved and written of them.

No waits and no clock: the actor calls it between two awaits, so a message is applied whole or not at all,
and a copy of the state has it or has it not.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stoker.exceptions import BadRequestError, NotFoundError
from stoker_train.parameter_server.storage.dense import DenseShard
from stoker_train.parameter_server.storage.keys import dense_bounds, sum_equal
from stoker_train.parameter_server.storage.sparse import SparseShard
from stoker_train.parameter_server.storage.spec import TableSpec, check_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from stoker_train.parameter_server.server.messages import Part

    Arrays = dict[str, NDArray[Any]]
    Shard = SparseShard | DenseShard

_CLIENTS = 10_000


class Tables:
    """The parts that server ``number`` of ``servers`` has of all tables."""

    def __init__(self, number: int, servers: int) -> None:
        self._number, self._servers = number, servers
        self.shards: dict[str, Shard] = {}
        self.seen: collections.OrderedDict[str, int] = collections.OrderedDict()
        """The ``order`` of the last push of each client, of those that pushed last."""
        self.counts: collections.Counter[str] = collections.Counter()

    def shard(self, spec: TableSpec) -> Shard:
        """Return the part of a table, made where it is not there; ConflictError if that is another table."""
        shard = self.shards.get(spec.name)
        if shard is None:
            shard = self.shards[spec.name] = self._new(spec)
        elif shard.spec != spec:
            check_same(shard.spec, spec)
        return shard

    def spec(self, name: str) -> TableSpec:
        """Return the specification of a table; NotFoundError names those that there are."""
        if name not in self.shards:
            known = ", ".join(sorted(self.shards)) or "none"
            raise NotFoundError(
                f"there is no table {name!r}\ntables: {known}; make one by sparse() or dense()",
                field="table",
            )
        return self.shards[name].spec

    def check(self, parts: Iterable[Part]) -> None:
        """Raise an error if a message does not fit its tables."""
        for part in parts:
            self.shard(part.spec)
            rows = () if part.spec.shape is not None or part.keys is None else (part.keys.size,)
            shape = (*rows, part.spec.width) if rows else (part.values.size,)
            if part.values.shape != shape or part.values.dtype != part.spec.dtype:
                raise BadRequestError(
                    f"values for table {part.spec.name!r} are {part.values.dtype}{part.values.shape}\n"
                    f"send {part.spec.dtype}{shape}",
                    field="values",
                )

    def is_new(self, client: str, order: int) -> bool:
        """Note a push; return False for one that was applied already."""
        last = self.seen.get(client, -1)
        if order <= last:
            self.counts["duplicates"] += 1
            return False
        self.seen[client] = order
        self.seen.move_to_end(client)
        if len(self.seen) > _CLIENTS:
            self.seen.popitem(last=False)
        return True

    def pull(
        self,
        spec: TableSpec,
        keys: NDArray[np.int64] | None,
        now_s: float,
        create: bool,
        empty: Callable[..., NDArray[Any]],
    ) -> NDArray[Any]:
        """Return rows, or the server's block of a dense table."""
        shard = self.shard(spec)
        if isinstance(shard, DenseShard):
            rows = shard.pull(empty)
        else:
            assert keys is not None
            rows = shard.pull(keys, now_s, create=create, empty=empty)
            self.counts["rows_pulled"] += keys.size
            self.counts["bytes_in"] += keys.nbytes
        self.counts["pulls"] += 1
        self.counts["bytes_out"] += rows.nbytes
        return rows

    def push(self, parts: Iterable[Part], now_s: float, method: str = "push") -> None:
        """Apply values: ``push`` gradients, ``add`` deltas or ``assign`` rows."""
        for part in parts:
            shard = self.shard(part.spec)
            assert part.keys is not None
            if isinstance(shard, DenseShard):
                getattr(shard, method)(int(part.keys[0]), part.values)
            else:
                getattr(shard, method)(part.keys, part.values, now_s)
                self.counts["rows_pushed"] += part.keys.size
            self.counts["bytes_in"] += part.nbytes
        self.counts["pushes"] += 1

    def push_of_ranks(
        self, by_rank: list[list[Part]], now_s: float, reduce: str, part_type: type[Part]
    ) -> None:
        """Apply the sum (or mean) of what ranks pushed, added up in their order."""
        groups: dict[tuple[str, int], list[Part]] = {}
        for parts in by_rank:
            for part in parts:
                first = -1 if part.spec.shape is None or part.keys is None else int(part.keys[0])
                groups.setdefault((part.spec.name, first), []).append(part)
        scale = 1.0 / len(by_rank) if reduce == "mean" else 1.0
        for group in groups.values():
            spec, keys = group[0].spec, group[0].keys
            if spec.shape is None:
                keys, values = sum_equal(
                    np.concatenate([part.keys for part in group if part.keys is not None]),
                    np.concatenate([part.values for part in group]),
                )
            else:
                values = group[0].values.copy()
                for part in group[1:]:
                    values += part.values
            if scale != 1.0:
                values = values * values.dtype.type(scale)
            self.push([part_type(spec, keys, values)], now_s)

    def export(self, number: int | None = None, servers: int = 1) -> list[tuple[TableSpec, Arrays]]:
        """Return copies of all rows; given a number, of those that this one of so many servers has."""
        return [
            (
                shard.spec,
                shard.export()
                if isinstance(shard, DenseShard) or number is None
                else shard.export(number, servers),
            )
            for shard in self.shards.values()
        ]

    def absorb(self, exports: Iterable[tuple[TableSpec, Arrays]], *, replace: bool = False) -> None:
        """Take rows that others exported; with ``replace``, in place of all that their tables have."""
        taken: dict[str, Shard] = {}
        for spec, arrays in exports:
            there = self.shards.get(spec.name)
            if there is not None:
                check_same(there.spec, spec)
            if spec.name not in taken:
                taken[spec.name] = self._new(spec) if replace or there is None else there
            taken[spec.name].absorb(arrays)
        self.shards |= taken

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return rows and memory of each table."""
        return {
            name: {"kind": shard.spec.kind, "rows": len(shard), "nbytes": shard.nbytes}
            for name, shard in self.shards.items()
        }

    def _new(self, spec: TableSpec) -> Shard:
        if spec.shape is None:
            return SparseShard(spec)
        return DenseShard(spec, *dense_bounds(spec.size, self._servers)[self._number])


def pack_spec(spec: TableSpec) -> NDArray[np.uint8]:
    """Return a specification as an array, for a file of arrays."""
    return np.frombuffer(msgspec.json.encode(spec), np.uint8)


def unpack_spec(array: NDArray[np.uint8]) -> TableSpec:
    """Return what ``pack_spec`` was given."""
    return msgspec.json.decode(array.tobytes(), type=TableSpec)
