"""The record by which clients find the servers of a name, in the cluster's keys and values.

Servers come in sets: each ``resize`` makes a new one, with the next epoch, and the record is what decides
which set is the one. Read by clients that are told that rows have moved, and by servers that start again.
"""

from __future__ import annotations

import msgspec

from stoker import kv
from stoker.exceptions import NotFoundError


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of a name."""

    epoch: int
    servers: int
    retired: tuple[tuple[int, int], ...] = ()
    """Epoch and number of servers of earlier sets that still answer that rows have moved."""
    timeout_s: float = 60.0


def actor_name(name: str, epoch: int, number: int) -> str:
    """Return the name of the actor that is a server."""
    return f"ps:{name}:{epoch}:{number}"


def key_of(name: str) -> str:
    """Return the key of a record; keys that begin with it and a slash belong to the name as well."""
    return f"ps/{name}"


def read(name: str) -> Record | None:
    """Return the record of a name, None if there is none."""
    value = kv.get(key_of(name))
    return None if value is None else msgspec.json.decode(value, type=Record)


def find(name: str) -> Record:
    """Return the record of a name; NotFoundError without one."""
    record = read(name)
    if record is None:
        raise NotFoundError(
            f"there are no parameter servers named {name!r}\n"
            "start them by stoker.ps.start(), in this namespace",
            field="name",
        )
    return record


def write(name: str, record: Record) -> None:
    """Make a set of servers the one that has the rows."""
    kv.put(key_of(name), msgspec.json.encode(record))


def delete(name: str) -> None:
    """Forget a name."""
    kv.delete_prefix(f"{key_of(name)}/")
    kv.delete(key_of(name))


def left_ranks(name: str) -> set[int]:
    """Return the workers that have ended."""
    return {int(key.rpartition("/")[2]) for key in kv.keys(f"{key_of(name)}/left/")}


def set_left(name: str, rank: int, *, has_left: bool) -> None:
    """Remember whether a worker has ended, for servers that start again."""
    key = f"{key_of(name)}/left/{rank}"
    if has_left:
        kv.put(key, b"1")
    else:
        kv.delete(key)


def forget_left(name: str) -> None:
    """Forget which workers have ended, as all have."""
    kv.delete_prefix(f"{key_of(name)}/left/")


def hold(name: str, epoch: int, holder: str, lease_s: float) -> None:
    """Have servers of a set that start again hold back changes, until ``let_go``, or the lease's end."""
    kv.put(_hold_key(name, epoch, holder), b"1", ttl_s=lease_s)


def let_go(name: str, epoch: int, holder: str) -> None:
    """End a ``hold``."""
    kv.delete(_hold_key(name, epoch, holder))


def holders(name: str, epoch: int) -> set[str]:
    """Return who has a set of servers hold back changes."""
    return {key.rpartition("/")[2] for key in kv.keys(_hold_key(name, epoch, ""))}


def _hold_key(name: str, epoch: int, holder: str) -> str:
    return f"{key_of(name)}/held/{epoch}/{holder}"
