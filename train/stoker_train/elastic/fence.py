"""The fence of a job's records: of two controllers only the one that took over last changes them.

A controller may be cut off, be taken for dead and come back, while its successor trains. So each of its
writes goes over what it wrote last, by compare-and-set (:class:`FencedKey`): the successor takes a key over
by writing it first, and from then on the other is refused. The ledger has many keys and one *index*, which
says which of them count: chunks are written once, under names of their writer's own, and are there for
readers when the index, which is fenced, names them (:class:`FencedLedger`). Keys are read and written by a
:class:`Store`; nothing else is done here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from stoker_train.elastic.core.ledger import HEAD, Head, chunk_key
from stoker_wire.errors import ConflictError, FencedError

__all__ = (
    "INDEX",
    "FencedKey",
    "FencedLedger",
    "Index",
    "Store",
    "chunk_names",
    "decode_index",
)

INDEX = "index"


class Store(Protocol):
    """The keys of a job: raw values, each changed at once."""

    def get(self, name: str) -> bytes | None:
        """Return a value, None where there is none."""

    def put(self, name: str, data: bytes, *, over: bytes | None) -> bool:
        """Write a value if the present one is ``over`` (None: if there is none); whether it was."""

    def put_new(self, name: str, data: bytes) -> None:
        """Write a value under a name that its writer alone has."""

    def delete(self, name: str) -> None:
        """Remove a key, if it is there."""


class Index(msgspec.Struct, frozen=True, omit_defaults=True):
    """The index of a ledger: its writer, and the writer and serial number of each chunk that counts.

    ``result`` is the attempt of the job whose result counts, 0 while it goes on.
    """

    attempt: int = 0
    serial: int = 0
    chunks: tuple[tuple[int, int], ...] = ()
    head: Head | None = None
    result: int = 0


def decode_index(data: bytes | None) -> Index:
    """Return the index that was kept; an empty one where there is none. msgspec.DecodeError for others."""
    return Index() if data is None else msgspec.json.decode(data, type=Index)


def chunk_names(index: Index) -> list[str]:
    """Return the ends of the keys of the chunks that count, in their order."""
    return [_name(number, one) for number, one in enumerate(index.chunks)]


def _name(number: int, one: tuple[int, int]) -> str:
    return f"{chunk_key(number)}.{one[0]}.{one[1]}"


class FencedKey:
    """One key of a job, as the controller of ``attempt`` has it. Its values are JSON with the attempt."""

    def __init__(self, store: Store, name: str, attempt: int) -> None:
        self._store, self._name, self._attempt = store, name, attempt
        self._present: bytes | None = None

    def take(self, renew: Callable[[bytes | None], bytes]) -> None:
        """Take the key over, with what ``renew`` makes of its value. FencedError from a later one."""
        while True:
            found = self._store.get(self._name)
            self._check(found)
            data = renew(found)
            if self._store.put(self._name, data, over=found):
                self._present = data
                return

    def write(self, data: bytes) -> None:
        """Write a value over this controller's last. FencedError where another's stands."""
        while not self._store.put(self._name, data, over=self._present):
            found = self._store.get(self._name)
            self._check(found)
            if found == self._present:
                raise FencedError(f"{self._name} is gone\nonly the newest attempt goes on")
            # A write of this controller whose answer was lost.
            self._present = found
        self._present = data

    def holds(self) -> bool:
        """Return whether no other controller has taken the key over, a moment ago."""
        return _attempt_of(self._store.get(self._name)) <= self._attempt

    def _check(self, found: bytes | None) -> None:
        if (other := _attempt_of(found)) > self._attempt:
            raise FencedError(
                f"{self._name} is held by attempt {other} of this job\nonly the newest attempt goes on"
            )


def _attempt_of(data: bytes | None) -> int:
    # By json, which reads the NaN and Infinity that json.dumps writes of metrics.
    return 0 if data is None else int(json.loads(data).get("attempt", 0))


class FencedLedger:
    """The keys of a job's ledger, as the controller of ``attempt`` writes them.

    What :meth:`write` was given counts as a whole, or not at all.
    """

    def __init__(self, store: Store, attempt: int) -> None:
        self._store, self._attempt = store, attempt
        self._key = FencedKey(store, INDEX, attempt)
        self._index = Index()
        self._lock, self._closed = threading.Lock(), False
        self._unused: list[str] = []
        """Keys of this writer that no index names any more, or never did."""

    def take(self) -> dict[str, bytes]:
        """Take the ledger over, and return it: chunks and head as :func:`.core.ledger.decode` reads them."""

        def renew(found: bytes | None) -> bytes:
            known = decode_index(found)
            self._index = msgspec.structs.replace(known, attempt=self._attempt, result=0)
            return msgspec.json.encode(self._index)

        self._key.take(renew)
        return read(self._store.get, self._index)

    def holds(self) -> bool:
        """Return whether no other controller has taken the ledger over, a moment ago."""
        return self._key.holds()

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Write what has changed of the ledger, see :meth:`.core.ledger.Ledger.changes`."""
        self.publish(self.stage(changes))
        self.sweep()

    def stage(self, changes: Mapping[str, bytes | None]) -> Index:
        """Write chunks under names of their own; returns the index by which they would count."""
        chunks = dict(enumerate(self._index.chunks))
        serial, head = self._index.serial, self._index.head
        for end, data in changes.items():
            if end == HEAD:
                head = None if data is None else msgspec.json.decode(data, type=Head)
            elif data is None:
                chunks.pop(int(end), None)
            else:
                serial += 1
                chunks[int(end)] = (self._attempt, serial)
                name = _name(int(end), chunks[int(end)])
                self._unused.append(name)
                # Before the put: one that fails may have been done, and its name is never used again.
                self._index = msgspec.structs.replace(self._index, serial=serial)
                self._store.put_new(name, data)
        # Of chunks after one that is missing nothing is read.
        order = range(next((n for n in range(len(chunks)) if n not in chunks), len(chunks)))
        return msgspec.structs.replace(
            self._index, chunks=tuple(chunks[n] for n in order), head=head
        )

    def publish(self, index: Index) -> None:
        """Have an index count. FencedError where another controller has taken over.

        ConflictError after :meth:`close`, which another thread may have called.
        """
        if index.chunks == self._index.chunks and index.head == self._index.head:
            return
        with self._lock:
            if self._closed:
                raise ConflictError("the ledger is closed\nits result is written: nothing is added")
            before = set(chunk_names(self._index))
            self._key.write(msgspec.json.encode(index))
            self._index = index
        now = set(chunk_names(index))
        self._unused = [*(one for one in self._unused if one not in now), *sorted(before - now)]

    def sweep(self) -> None:
        """Remove chunks that count no more."""
        while self._unused:
            self._store.delete(self._unused[-1])
            self._unused.pop()

    def close(self) -> None:
        """Say that this attempt's result is the job's: nothing is published after it.

        FencedError where another controller took over.
        """
        with self._lock:
            self._closed = True
            index = msgspec.structs.replace(self._index, result=self._attempt)
            self._key.write(msgspec.json.encode(index))
            self._index = index


def read(get: Callable[[str], bytes | None], index: Index) -> dict[str, bytes]:
    """Return chunks and head of a ledger by its index, as :func:`.core.ledger.decode` reads them.

    ``get`` has the values, by the ends of their keys.
    """
    found = {}
    for number, name in enumerate(chunk_names(index)):
        data = get(name)
        if data is None:  # its writer has written it anew since
            break
        found[chunk_key(number)] = data
    if index.head is not None:
        found[HEAD] = msgspec.json.encode(index.head)
    return found
