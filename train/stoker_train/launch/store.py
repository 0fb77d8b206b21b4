"""``stoker.train.KVStore``: a ``torch.distributed`` store whose keys are in the cluster's KV.

No process of it has to listen, so none has to be reached or to live on: the store of rank 0 that dies does
not take the others along. Made by users for ``init_process_group(store=...)``, and by the rendezvous
backend. torch's C++ code calls it from its own threads, by the names that its trampoline knows.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from stoker.exceptions import BadRequestError, StokerError
from stoker_train.launch.kv_line import POLL_S, KvLine
from stoker_wire.messages.control import MAX_KEY, KvAdd, KvCompareSet, KvPut

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

_TIMEOUT_S = 300.0
_NAMED = 5
_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5
_HASH_CHARS = 40
_EMPTY: type[Exception] = getattr(dist, "QueueEmptyError", dist.DistStoreError)
"""torch has a class for an empty queue since it has queues."""


class KVStore(Store):
    """A store of all processes of the cluster that give the same ``prefix``.

    ``timeout`` (seconds, or a timedelta) bounds each wait for a key, with ``DistStoreError``. Keys are in
    the job's namespace, or in ``namespace``, and stay until they are deleted, ``ttl_s`` after their last
    change, or :meth:`clear`: give each run a prefix of its own. All that fails is a ``DistStoreError``.

    Queues work on the store itself; torch's ``PrefixStore`` passes none to a store written in Python.
    """

    def __init__(
        self,
        prefix: str,
        timeout: float | timedelta = _TIMEOUT_S,
        *,
        namespace: str | None = None,
        ttl_s: float | None = None,
        line: KvLine | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        super().__init__()
        if not prefix:
            raise BadRequestError(
                "the prefix of a KVStore is empty\ngive the run's name, as KVStore('run-1')",
                field="prefix",
            )
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        if limit <= timedelta(0):
            raise BadRequestError(
                f"timeout={timeout!r} is no time to wait\ngive seconds above 0", field="timeout"
            )
        self.set_timeout(limit)
        self._prefix = prefix
        self._ttl_s = ttl_s
        self._poll_s = poll_s
        self._line = KvLine.of_process(namespace) if line is None else line
        # A PrefixStore or a process group keeps the C++ half of a store alone. When the Python half goes,
        # so do its methods, and torch's next call is an internal error: so it stays, a few hundred bytes.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        with _store_errors():
            self._line.do(KvPut(key=self._key(key), value=_bytes(value), ttl_s=self._ttl_s))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        return self.multi_get([key])[0]

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which begins at 0, and return the sum."""
        operation = KvAdd(key=self._key(key), amount=value, ttl_s=self._ttl_s)
        with _store_errors():
            reply = self._line.do(operation)
        assert reply.value is not None
        return int(reply.value)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key that has the expected value, or is absent where that is empty; return what it has then.

        A key that is absent, and was expected to have a value, stays so: the answer is that value.
        """
        desired = _bytes(desired_value)
        operation = KvCompareSet(
            key=self._key(key),
            expected=_bytes(expected_value),
            desired=desired,
            ttl_s=self._ttl_s,
        )
        with _store_errors():
            reply = self._line.do(operation)
        return desired if reply.value is None else reply.value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there; a queue is as long as it has values."""
        wanted = {self._key(key): key for key in keys}
        with _store_errors():
            found = self._line.read(wanted)
        return not self._without_queue([key for name, key in wanted.items() if name not in found])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; DistStoreError names those that are missing.

        Queues are looked at when it begins, and at long intervals: :meth:`queue_pop` waits for values.
        """
        limit_s = (self._limit if timeout is None else timeout).total_seconds()
        deadline_s = time.monotonic() + limit_s
        missing, wait_s = list(keys), 0.0
        while True:
            names = {self._key(key): key for key in missing}
            with _store_errors():
                _, absent = self._line.wait(names, wait_s, check=self._check_lives)
            missing = self._without_queue([names[name] for name in absent])
            left_s = deadline_s - time.monotonic()
            if not missing:
                return
            if left_s <= 0:
                raise self._late(missing, limit_s)
            wait_s = min(left_s, self._poll_s)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        with _store_errors():
            return self._line.delete(self._key(key))

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Return the keys, sorted."""
        base = self._key("")
        with _store_errors():
            return sorted(one.key.removeprefix(base) for one in self._line.entries(base))

    def append(self, key: str, value: str | bytes) -> None:
        """Add bytes to the end of a value; a key that is absent begins with them."""
        name, more = self._key(key), _bytes(value)

        def appended() -> bool | None:
            item = self._line.read([name]).get(name)
            old, revision = (b"", 0) if item is None else (item.value, item.revision)
            set_at = self._line.put_if(name, old + more, revision, self._ttl_s)
            return None if set_at is None else True

        self._repeat(appended, f"key {key!r} changed whenever this process wanted to append")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, once all are there."""
        found = self._wait(keys, self._limit)
        return [found[self._key(key)] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys, one after another."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue."""
        base = self._queue(key)
        with _store_errors():
            reply = self._line.do(KvAdd(key=f"{base}n", ttl_s=self._ttl_s))
            assert reply.value is not None
            place = f"{base}at/{int(reply.value):020d}"
            self._line.do(KvPut(key=place, value=_bytes(value), ttl_s=self._ttl_s))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue; of several that want it one gets it.

        Waits for one, up to the timeout; without ``block`` torch's ``QueueEmptyError`` if there is none.
        """
        base = f"{self._queue(key)}at/"

        def taken() -> bytes | None:
            for name in sorted(one.key for one in self._line.entries(base)):
                item = self._line.read([name]).get(name)
                if item is not None and self._line.delete(name, item.revision):
                    return item.value
            if not block:
                raise _EMPTY(f"queue {key!r} is empty")
            return None

        return self._repeat(taken, f"queue {key!r} was empty")

    def queue_len(self, key: str) -> int:
        """Return how many values a queue has."""
        with _store_errors():
            return sum(1 for _ in self._line.entries(f"{self._queue(key)}at/"))

    def has_extended_api(self) -> bool:
        """Tell torch that append, multi_get and multi_set are there."""
        return True

    def clone(self) -> KVStore:
        """Return another store of the same keys, for another thread of torch."""
        return type(self)(self._prefix, self._limit, ttl_s=self._ttl_s, line=self._line)

    def clear(self) -> int:
        """Remove all keys and queues of the store; return how many keys that were."""
        with _store_errors():
            names = [one.key for one in self._line.entries(f"{self._prefix}/")]
            return sum(self._line.delete(name) for name in names)

    # The names by which C++ calls them.
    getNumKeys = num_keys
    deleteKey = delete_key

    @property
    def _limit(self) -> timedelta:
        limit: timedelta = self.timeout  # type: ignore[attr-defined]
        return limit

    def _check_lives(self) -> None:
        """Raise DistStoreError where no wait makes sense any longer; what a fence is made of."""

    def _wait(self, keys: Sequence[str], limit: timedelta) -> dict[str, bytes]:
        limit_s = limit.total_seconds()
        names = {self._key(key): key for key in keys}
        with _store_errors():
            found, missing = self._line.wait(
                names, limit_s, check=self._check_lives, poll_s=self._poll_s
            )
        if missing:
            raise self._late([names[name] for name in missing], limit_s)
        return {name: item.value for name, item in found.items()}

    def _late(self, keys: Sequence[str], limit_s: float) -> dist.DistStoreError:
        shown = ", ".join(repr(key) for key in keys[:_NAMED])
        more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        return dist.DistStoreError(
            f"wait timeout after {1000 * limit_s:.0f} ms: nobody set {shown}{more}\n"
            f"in the store {self._prefix!r}: a process that should have died, or is late"
        )

    def _without_queue(self, keys: Sequence[str]) -> list[str]:
        """Return those of the keys that are no queue with values."""
        counters = {f"{self._queue(key)}n": key for key in keys}
        with _store_errors():
            used = {counters[name] for name in self._line.read(counters)}
        return [key for key in keys if key not in used or not self.queue_len(key)]

    def _repeat(self, attempt: Callable[[], T | None], why: str) -> T:
        """Try until there is a result, or the timeout is over."""
        limit_s = self._limit.total_seconds()
        deadline_s = time.monotonic() + limit_s
        pause_s = _PAUSE_S
        while True:
            self._check_lives()
            with _store_errors():
                result = attempt()
            if result is not None:
                return result
            if time.monotonic() >= deadline_s:
                raise dist.DistStoreError(
                    f"wait timeout after {1000 * limit_s:.0f} ms: {why}\nin the store {self._prefix!r}"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _key(self, key: str) -> str:
        return self._bounded(f"{self._prefix}/k/", key)

    def _queue(self, key: str) -> str:
        return self._bounded(f"{self._prefix}/q/", key, room=24) + "/"

    def _bounded(self, base: str, key: str, room: int = 0) -> str:
        """Return a name of the KV; the end of one that is too long there is its hash."""
        most = MAX_KEY - len(base) - room
        if len(key) <= most:
            return base + key
        digest = hashlib.sha256(key.encode()).hexdigest()[:_HASH_CHARS]
        return f"{base}{key[: most - _HASH_CHARS]}{digest}"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@contextmanager
def _store_errors() -> Iterator[None]:
    """Turn what the cluster answers into the error by which torch knows a store that failed."""
    try:
        yield
    except StokerError as error:
        raise dist.DistStoreError(str(error)) from error
