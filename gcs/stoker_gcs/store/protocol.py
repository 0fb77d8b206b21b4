"""The contract of a store, proved by one suite (tests/contract) over memory, SQLite and PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stoker_gcs.state.schema import Table
    from stoker_gcs.store.changes import Change, Condition, Row, Value, WriteConflict
    from stoker_gcs.store.training import Point
    from stoker_wire.data.spool import TaskRow
    from stoker_wire.messages.control import Event


class Store(Protocol):
    """Durable tables and the event log.

    Reads see every commit that was acknowledged before they began. Sequence numbers grow in commit
    order: a reader that has read up to ``seq`` never finds an event below it later. They may have gaps.
    """

    @property
    def shared(self) -> bool:
        """Whether other processes may write too, so that events can come from elsewhere."""
        ...

    @property
    def kind(self) -> str:
        """``memory``, ``sqlite`` or ``postgresql``."""
        ...

    async def nbytes(self) -> int | None:
        """Return the size of the database; None if there is no telling."""
        ...

    async def start(self) -> None:
        """Connect and check the schema; a DatabaseError names the command to run."""
        ...

    async def stop(self) -> None:
        """Close all connections. What was committed stays."""
        ...

    async def end_stalled(self) -> None:
        """End the transactions of other processes that hold up all others and cannot go on."""
        ...

    async def commit(self, changes: Sequence[Change]) -> list[tuple[Event, ...] | WriteConflict]:
        """Do the changes in one transaction; one with a conflict is left out whole, the others stay.

        Durable when it returns. The result of each change is its events, numbered, or its WriteConflict.
        """
        ...

    async def get(self, table: Table, key: Mapping[str, str | int]) -> Row | None:
        """Return the row with this key, or None."""
        ...

    async def select(
        self,
        table: Table,
        where: Mapping[str, Condition] | None = None,
        *,
        after: Sequence[str | int] = (),
        limit: int = 1000,
        columns: Sequence[str] = (),
        arrival: bool = False,
        descending: bool = False,
        any_order: bool = False,
    ) -> list[Row]:
        """Return rows that match, in key order, behind the key ``after``; a tuple means any of its values.

        With ``arrival`` the rows of a listed table come in the order of their numbers instead; these
        are in the rows then (:data:`stoker_gcs.state.schema.ARRIVAL`), and ``after`` is one of them.
        With ``any_order`` they come as an index of the conditions finds them; there is no ``after``.
        """
        ...

    async def count(
        self, table: Table, where: Mapping[str, Condition] | None = None, *, most: int = 10_000
    ) -> int:
        """Return how many rows match; counting stops at ``most``."""
        ...

    async def summed(
        self, table: Table, column: str, where: Mapping[str, Condition] | None = None
    ) -> tuple[int, int]:
        """Return how many rows match, and the sum of a column of theirs."""
        ...

    async def grouped(
        self,
        table: Table,
        by: Sequence[str],
        sums: Sequence[str],
        where: Mapping[str, Condition] | None = None,
    ) -> list[Row]:
        """Return how many rows match for each of the values of ``by``, as ``n``, and sums of columns."""
        ...

    async def first_start(self, where: Mapping[str, Condition]) -> float | None:
        """Return when the first of the attempts that match began; None if none has."""
        ...

    async def busy(
        self, where: Mapping[str, Condition], first_s: float, bucket_s: float
    ) -> list[Row]:
        """Return what attempts of up to a bucket add to each bucket of time of each worker.

        Of each worker and bucket: how many began in it, as ``n``, and ``busy_s``.
        """
        ...

    async def long_attempts(
        self, where: Mapping[str, Condition], longer_s: float, columns: Sequence[str], *, limit: int
    ) -> list[Row]:
        """Return attempts that match and ran longer, or run, those that began first."""
        ...

    async def distinct(
        self, table: Table, column: str, where: Mapping[str, Condition] | None = None
    ) -> list[Value]:
        """Return the values of a column of the rows that match, each once."""
        ...

    async def events(self, after: int, limit: int = 1000) -> list[Event]:
        """Return events with ``seq > after``, oldest first."""
        ...

    async def events_back(self, before: int, limit: int = 1000) -> list[Event]:
        """Return events with ``seq < before``, newest first."""
        ...

    async def bounds(self) -> tuple[int, int]:
        """Return ``(compacted, last)``: events up to ``compacted`` are gone; ``last`` is the newest."""
        ...

    async def compact(self, keep_after: int) -> None:
        """Forget the events with ``seq <= keep_after``."""
        ...

    async def put_tasks(self, rows: Sequence[TaskRow]) -> None:
        """Merge attempts into the history (see :mod:`stoker_gcs.store.task_merge`) and count them.

        Durable on return, whole or not at all.
        """
        ...

    async def put_points(self, points: Sequence[Point]) -> None:
        """Store values of training (see :mod:`stoker_gcs.store.training`); the later of a step stays.

        Durable on return, whole or not at all.
        """
        ...

    async def curve(self, series: int, first: int, last: int, size: int) -> list[Row]:
        """Return what the values of a series are in each range of ``size`` steps, from ``first`` on.

        ``size`` is a multiple of a width in which they are added up, and ``first`` of the same.
        """
        ...
