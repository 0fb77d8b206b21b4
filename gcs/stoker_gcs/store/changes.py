"""The operations of writers: one Change is a few row operations and their events.

Operations are data, not SQL, so that every store (and the specification in memory) executes the same
ones. Fencing is data too: ``Update.expect`` and ``Delete.expect`` become part of the WHERE, and an
operation that meets another row than it expected undoes its whole change with a
:class:`WriteConflict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from stoker_gcs.state.schema import Table

Value: TypeAlias = str | int | float | bytes | None
Row: TypeAlias = dict[str, Any]
"""A row as stores return it; the column's type in :mod:`stoker_gcs.state.schema` says what a value is."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A condition of a select: the column starts with this text.

    The column is one of the key, or ``searched`` (see :class:`stoker_gcs.state.schema.Table`).
    """

    text: str

    @property
    def beyond(self) -> str:
        """The first text that is greater than all with this prefix; empty if there is none."""
        text = self.text.rstrip("\U0010ffff")
        if not text:
            return ""
        after = ord(text[-1]) + 1
        # Half a surrogate pair is no character.
        return text[:-1] + chr(0xE000 if 0xD800 <= after < 0xE000 else after)


@dataclass(frozen=True, slots=True)
class Expired:
    """A condition: the column is a time that is not after this one. NULL never is."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Unexpired:
    """A condition: the column is NULL, or a time after this one."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Between:
    """A condition: the column is a number from ``first`` to ``last``, both included."""

    first: float
    last: float


Condition: TypeAlias = Value | tuple[Value, ...] | Prefix | Expired | Unexpired | Between


class WriteConflict(Exception):
    """An operation met a row that is not as it expected; nothing of its change was done.

    ``table`` names where. Callers read again and decide: retry, or refuse with a StokerError.
    """

    def __init__(self, table: str, what: str) -> None:
        super().__init__(f"{table}: {what}")
        self.table = table


@dataclass(frozen=True, slots=True)
class Insert:
    """Addition of a row; a WriteConflict if the key or a unique column is taken.

    ``stamp`` is a column that gets the sequence number of the change's last event.
    """

    table: Table
    values: Mapping[str, Value]
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Upsert:
    """Addition of a row, or replacement of the one with the same key. ``stamp`` as of an Insert."""

    table: Table
    values: Mapping[str, Value]
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Update:
    """Change of the one row where the key and all of ``expect`` match.

    With ``must_exist`` it is a WriteConflict if there is none. ``stamp`` as of an Insert.
    """

    table: Table
    key: Mapping[str, Value]
    values: Mapping[str, Value]
    expect: Mapping[str, Value] = field(default_factory=dict)
    must_exist: bool = True
    stamp: str = ""


@dataclass(frozen=True, slots=True)
class Delete:
    """Removal of the rows where all of ``where`` match; ``must_exist`` makes none a WriteConflict.

    With ``most``, of a listed table, it removes no more of them than that.
    """

    table: Table
    where: Mapping[str, Condition]
    must_exist: bool = False
    most: int = 0


@dataclass(frozen=True, slots=True)
class Append:
    """Addition of an event; the store gives it the next sequence number. ``payload`` is msgpack of a map."""

    kind: str
    subject: str
    payload: bytes
    at_s: float


Operation: TypeAlias = Insert | Upsert | Update | Delete


def stamped(operation: Insert | Upsert | Update, seq: int) -> dict[str, Value]:
    """Return the values of an operation, with ``seq`` in the column that it stamps."""
    return {**operation.values, operation.stamp: seq} if operation.stamp else dict(operation.values)


@dataclass(frozen=True, slots=True)
class Change:
    """Row operations and events of one decision: all of them or none."""

    operations: tuple[Operation, ...] = ()
    events: tuple[Append, ...] = ()

    @property
    def stamps(self) -> bool:
        """Whether an operation needs the number of the change's last event, which is added first then."""
        return any(not isinstance(op, Delete) and op.stamp for op in self.operations)
