"""``stoker.kv``: small raw values by key, kept by the control store for every process of a cluster.

For rendezvous, flags, counters and settings; large values belong in ``stoker.put``. Keys live in a
namespace (by default the job's own) until they are deleted, or their ``ttl_s`` is over. Each change of a key
has a *revision*, a number that grows; a change may depend on it, or on the value, so that of several
processes exactly one is first. Every call blocks the calling thread, so coroutines should make it in
a thread. A call that is sent again, because its answer was lost, counts once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload
from urllib.parse import quote

import msgspec

from stoker.exceptions import BadRequestError, ConflictError, GetTimeoutError, NotFoundError
from stoker.runtime import current
from stoker_wire.messages.control import (
    KvAdd,
    KvCompareSet,
    KvDelete,
    KvDeletePrefix,
    KvEntry,
    KvGet,
    KvOperation,
    KvPut,
    KvReply,
    Page,
)
from stoker_wire.messages.events import KvChange

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from stoker_wire.messages.control import Event

__all__ = (
    "Change",
    "Entry",
    "Watch",
    "add",
    "compare_set",
    "delete",
    "delete_prefix",
    "entry",
    "get",
    "keys",
    "put",
    "wait",
    "watch",
)

_CALL_S = 15.0
_DELETE_S = 60.0
_POLL_S = 20.0
"""One long poll: a longer wait is made of several, so that no proxy cuts it."""
_KEYS_PER_CALL = 1000
_NAMED = 5
_FOREVER_S = 10 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value, the revision of its last change, and when it expires (epoch seconds)."""

    key: str
    value: bytes
    revision: int
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a key. ``value`` is None if it was deleted, or has more than 1024 bytes.

    ``revision`` is the key's, and where a later watch goes on (``since``). ``expired``: it was deleted
    because its time was over.
    """

    key: str
    revision: int
    value: bytes | None = None
    nbytes: int = 0
    deleted: bool = False
    expired: bool = False


def put(
    key: str,
    value: bytes | str,
    *,
    namespace: str | None = None,
    if_absent: bool = False,
    if_revision: int | None = None,
    if_value: bytes | str | None = None,
    ttl_s: float | None = None,
) -> bool:
    """Set ``key``; with conditions only if all of them hold, else leave it and return False.

    ``if_absent``: the key does not exist. ``if_revision``: its last change is this one (see ``entry``;
    0: it does not exist). ``if_value``: this is its value. After ``ttl_s`` seconds it is gone, unless it is
    put again; without, it stays.
    """
    body = KvPut(
        key=_key(key),
        value=_bytes("put", key, "value", value),
        if_absent=if_absent,
        if_revision=if_revision,
        if_value=None if if_value is None else _bytes("put", key, "if_value", if_value),
        ttl_s=ttl_s,
    )
    try:
        _operate(body, namespace)
    except ConflictError:
        if if_absent or if_revision is not None or if_value is not None:
            return False
        raise
    return True


def add(
    key: str, amount: int = 1, *, namespace: str | None = None, ttl_s: float | None = None
) -> int:
    """Add ``amount`` to the counter ``key`` and return the sum; one that does not exist counts as 0.

    Its value is a text of decimals; ``BadRequestError`` if it is something else. It expires when it did,
    unless ``ttl_s`` is given.
    """
    reply = _operate(KvAdd(key=_key(key), amount=amount, ttl_s=ttl_s), namespace)
    assert reply.value is not None
    return int(reply.value)


def compare_set(
    key: str,
    expected: bytes | str,
    desired: bytes | str,
    *,
    namespace: str | None = None,
    ttl_s: float | None = None,
) -> bytes:
    """Set ``key`` to ``desired`` if it holds ``expected``; return what it holds afterwards.

    As ``torch.distributed.Store.compare_set``: an empty ``expected`` also fits a key that does not exist;
    any other leaves it absent, and is returned.
    """
    wanted = _bytes("compare_set", key, "desired", desired)
    body = KvCompareSet(
        key=_key(key),
        expected=_bytes("compare_set", key, "expected", expected),
        desired=wanted,
        ttl_s=ttl_s,
    )
    reply = _operate(body, namespace)
    return wanted if reply.value is None else reply.value


def get(key: str, *, namespace: str | None = None) -> bytes | None:
    """Return the value of ``key``, or None if it is not there."""
    found = entry(key, namespace=namespace)
    return None if found is None else found.value


def entry(key: str, *, namespace: str | None = None) -> Entry | None:
    """Return ``key`` with its revision and its time of expiry, or None if it is not there."""
    return _read((_key(key),), namespace, 0.0).get(key)


@overload
def wait(keys: str, *, timeout: float, namespace: str | None = None) -> bytes: ...


@overload
def wait(
    keys: list[str] | tuple[str, ...], *, timeout: float, namespace: str | None = None
) -> dict[str, bytes]: ...


def wait(
    keys: str | list[str] | tuple[str, ...], *, timeout: float, namespace: str | None = None
) -> bytes | dict[str, bytes]:
    """Return the value of a key as soon as it exists; of several keys, by name, once all were there.

    Raises ``GetTimeoutError``, which names those that are missing, after ``timeout`` seconds.
    """
    wanted = [_key(key) for key in ([keys] if isinstance(keys, str) else keys)]
    found: dict[str, bytes] = {}
    deadline_s = time.monotonic() + timeout
    while True:
        missing = [key for key in wanted if key not in found]
        if not missing:
            return found[keys] if isinstance(keys, str) else {key: found[key] for key in wanted}
        left_s = deadline_s - time.monotonic()
        read = _read(missing[:_KEYS_PER_CALL], namespace, max(0.0, min(left_s, _POLL_S)))
        found.update((key, one.value) for key, one in read.items())
        missing = [key for key in missing if key not in found]
        if missing and time.monotonic() >= deadline_s:
            raise GetTimeoutError(_nobody_set(missing, len(wanted), timeout), field="keys")


def delete(key: str, *, namespace: str | None = None, if_revision: int | None = None) -> bool:
    """Remove ``key``; False if it was not there, or its last change is not ``if_revision``."""
    try:
        _operate(KvDelete(key=_key(key), if_revision=if_revision), namespace)
    except NotFoundError:
        return False
    except ConflictError:
        if if_revision is None:
            raise
        return False
    return True


def delete_prefix(prefix: str, *, namespace: str | None = None) -> int:
    """Remove all keys that start with ``prefix`` (all of the namespace, if it is empty); return how many.

    They go in batches: a key that is put meanwhile may stay.
    """
    return _operate(KvDeletePrefix(prefix=prefix), namespace, _DELETE_S).count


def keys(prefix: str = "", *, namespace: str | None = None) -> list[str]:
    """Return the keys that start with ``prefix``, sorted."""
    names: list[str] = []
    cursor = ""
    while True:
        page = _page(prefix, namespace, 1000, cursor)
        names += [one.key for one in page.items]
        cursor = page.next_cursor
        if not cursor:
            return sorted(names)


def watch(
    prefix: str = "",
    *,
    since: int | None = None,
    timeout: float | None = None,
    namespace: str | None = None,
) -> Watch:
    """Return an iterator over the changes of keys that start with ``prefix``, in their order.

    It begins with the first change after this call, or after the revision ``since``, none left out and
    none twice, also over restarts of the control store. ``timeout`` bounds the wait for each change, with
    ``GetTimeoutError``; None waits for ever. Raises ``CompactedError`` if the changes after ``since``
    are no longer known: read the keys, then watch anew.

    ::

        with stoker.kv.watch("config/") as changes:
            for change in changes:
                print(change.key, change.value)
    """
    return Watch(prefix, _namespace(namespace), since, timeout)


class Watch(Iterator[Change]):
    """An iterator over changes; ``close`` it, or use it in a ``with``. Not for several threads at once."""

    def __init__(
        self, prefix: str, namespace: str, since: int | None, timeout: float | None
    ) -> None:
        self._prefix = prefix
        self._namespace = namespace
        self._timeout = timeout
        self._runtime = current.runtime()
        self._events: AsyncGenerator[Event, None] | None = None
        self._next: asyncio.Task[Event] | None = None
        self._closed = False
        self.since = _page(prefix, namespace, 1, "").seq if since is None else since
        """The revision of the last change that was returned, or where the watch began."""

    def __next__(self) -> Change:
        """Return the next change; GetTimeoutError if there is none in time."""
        if self._closed:
            raise StopIteration
        limit_s = _FOREVER_S if self._timeout is None else self._timeout
        if not self._runtime.io.run(self._arrives(limit_s), limit_s + _CALL_S):
            raise GetTimeoutError(
                f"no key with prefix {self._prefix!r} was changed within {limit_s:g} s\n"
                f"in namespace {self._namespace!r}, after revision {self.since}",
                field="prefix",
            )
        # Taken on this thread, so that a wait that the user interrupts takes nothing with it.
        arrived, self._next = self._next, None
        assert arrived is not None
        if arrived.exception() is not None:
            self._events = None
        event = arrived.result()
        self.since = event.seq
        change = msgspec.convert(event.payload, KvChange)
        return Change(
            key=change.key,
            revision=event.seq,
            value=change.value,
            nbytes=change.nbytes,
            deleted=change.deleted,
            expired=change.expired,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch; the iterator is exhausted."""
        if not self._closed:
            self._closed = True
            self._runtime.io.run(self._end(), _CALL_S)

    async def _arrives(self, limit_s: float) -> bool:
        # A wait that ends leaves the stream open: the task goes on, and the next call takes it up.
        if self._next is None:
            if self._events is None:
                path = f"/v1/kv/{quote(self._namespace, safe='')}"
                query = {"prefix": self._prefix}
                self._events = self._runtime.clients.gcs.watch(path, self.since, query)
            self._next = self._runtime.io.background.spawn(
                _following(self._events), name="kv-watch", report=False
            )
        done, _ = await asyncio.wait((self._next,), timeout=limit_s)
        return bool(done)

    async def _end(self) -> None:
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait((self._next,))
        if self._events is not None:
            await self._events.aclose()


async def _following(events: AsyncGenerator[Event, None]) -> Event:
    return await anext(events)


def _operate(body: KvOperation, namespace: str | None, timeout_s: float = _CALL_S) -> KvReply:
    runtime = current.runtime()
    path = f"/v1/kv/{quote(_namespace(namespace), safe='')}"
    call = runtime.clients.gcs.call("POST", path, body, reply=KvReply, timeout_s=timeout_s)
    return runtime.io.run(call, timeout_s + 1)


def _read(keys: Sequence[str], namespace: str | None, wait_s: float) -> dict[str, Entry]:
    reply = _operate(KvGet(keys=tuple(keys), wait_s=wait_s), namespace, wait_s + _CALL_S)
    return {
        one.key: Entry(one.key, one.value, one.revision, one.expires_at_s) for one in reply.items
    }


def _page(prefix: str, namespace: str | None, limit: int, cursor: str) -> Page[KvEntry]:
    runtime = current.runtime()
    path = f"/v1/kv/{quote(_namespace(namespace), safe='')}"
    query: dict[str, Any] = {"prefix": prefix, "limit": limit, "cursor": cursor or None}
    return runtime.io.run(
        runtime.clients.gcs.call("GET", path, reply=Page[KvEntry], query=query), _CALL_S
    )


def _nobody_set(missing: list[str], wanted: int, timeout: float) -> str:
    if wanted == 1:
        return f"nobody set the key {missing[0]!r} within {timeout:g} s"
    names = ", ".join(repr(key) for key in missing[:_NAMED])
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    return f"nobody set {len(missing)} of {wanted} keys within {timeout:g} s: {names}{more}"


def _bytes(function: str, key: str, name: str, value: bytes | str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes):
        raise BadRequestError(
            f"kv.{function}({key!r}): the {name} is a {type(value).__name__}\n"
            "give bytes or str, or keep objects with stoker.put()",
            field=name,
        )
    return value


def _key(key: str) -> str:
    if not key:
        raise BadRequestError("a key of stoker.kv is a text of at least one character", field="key")
    return key


def _namespace(namespace: str | None) -> str:
    return current.runtime().job.namespace if namespace is None else namespace
