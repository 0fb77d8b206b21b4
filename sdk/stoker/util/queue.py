"""``Queue``: a first-in first-out queue that any task, actor or driver of a cluster can share."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from stoker.api.calls import get, kill
from stoker.api.remote import remote
from stoker.exceptions import BadRequestError

T = TypeVar("T")

_MAX_CONCURRENCY = 1_000_000
"""Of the actor: a call that waits for an item runs, and must not keep others from running."""


class Empty(queue.Empty):
    """The error for a queue without an item (within the timeout)."""


class Full(queue.Full):
    """The error for a queue without room (within the timeout)."""


class Queue(Generic[T]):
    """A queue in an actor of its own. Pass it to tasks and actors; all see the same items.

    ``maxsize`` 0 means no bound. ``actor_options`` are those of the actor, such as ``name`` or
    ``num_cpus``. The queue, with what is in it, ends with the job, or at :meth:`shutdown`.
    """

    def __init__(self, maxsize: int = 0, actor_options: Mapping[str, Any] | None = None) -> None:
        options = {"max_concurrency": _MAX_CONCURRENCY, **(actor_options or {})}
        self.maxsize = maxsize
        self.actor: Any = remote(**options)(_QueueActor).remote(maxsize)

    def __len__(self) -> int:
        return self.size()

    def size(self) -> int:
        """Return how many items are in the queue now."""
        return int(get(self.actor.size.remote()))

    qsize = size

    def empty(self) -> bool:
        """Return whether nothing is in the queue now."""
        return self.size() == 0

    def full(self) -> bool:
        """Return whether the queue has no room now."""
        return 0 < self.maxsize <= self.size()

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Add an item, waiting up to ``timeout`` seconds for room (None: as long as it takes).

        Raises ``Full`` if there is none, at once without ``block``.
        """
        if not get(self.actor.put.remote([item], _timeout_s(block, timeout))):
            raise Full

    async def put_async(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Add an item as :meth:`put` does, from a coroutine."""
        if not await self.actor.put.remote([item], _timeout_s(block, timeout)):
            raise Full

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the oldest item, waiting up to ``timeout`` seconds for one (None: for ever).

        Raises ``Empty`` if there is none, at once without ``block``.
        """
        item: T = _single(get(self.actor.get.remote(_timeout_s(block, timeout))))
        return item

    async def get_async(self, block: bool = True, timeout: float | None = None) -> T:
        """Take an item as :meth:`get` does, from a coroutine."""
        item: T = _single(await self.actor.get.remote(_timeout_s(block, timeout)))
        return item

    def put_nowait(self, item: T) -> None:
        """Add an item as ``put(item, block=False)`` does."""
        self.put(item, block=False)

    def get_nowait(self) -> T:
        """Take an item as ``get(block=False)`` does."""
        return self.get(block=False)

    def put_nowait_batch(self, items: Iterable[T]) -> None:
        """Add all items or, if there is not room for all, none (``Full``)."""
        if not get(self.actor.put.remote(list(items), 0.0)):
            raise Full

    def get_nowait_batch(self, num_items: int) -> list[T]:
        """Take ``num_items`` items or, if there are fewer, none (``Empty``)."""
        if num_items < 0:
            raise BadRequestError(
                f"get_nowait_batch({num_items}): give a number from 0", field="num_items"
            )
        items: list[T] | None = get(self.actor.get_batch.remote(num_items))
        if items is None:
            raise Empty
        return items

    def shutdown(self, force: bool = True) -> None:
        """End the queue's actor; what is in the queue is lost.

        Waiting calls raise ``ActorDiedError``. ``force`` is accepted for habit's sake.
        """
        kill(self.actor)


class _QueueActor:
    """The actor with the items. They come and go in lists, so that None is an item like others."""

    def __init__(self, maxsize: int) -> None:
        self._maxsize = maxsize
        self._queue: asyncio.Queue[Any] = asyncio.Queue(maxsize)

    async def size(self) -> int:
        return self._queue.qsize()

    async def put(self, items: list[Any], timeout_s: float | None) -> bool:
        if timeout_s == 0.0:
            if 0 < self._maxsize < self._queue.qsize() + len(items):
                return False
            for item in items:
                self._queue.put_nowait(item)
            return True
        try:
            async with asyncio.timeout(timeout_s):
                for item in items:
                    await self._queue.put(item)
        except TimeoutError:
            return False
        return True

    async def get(self, timeout_s: float | None) -> list[Any]:
        if timeout_s == 0.0:
            return [] if self._queue.empty() else [self._queue.get_nowait()]
        try:
            async with asyncio.timeout(timeout_s):
                return [await self._queue.get()]
        except TimeoutError:
            return []

    async def get_batch(self, count: int) -> list[Any] | None:
        if self._queue.qsize() < count:
            return None
        return [self._queue.get_nowait() for _ in range(count)]


def _timeout_s(block: bool, timeout: float | None) -> float | None:
    if timeout is not None and timeout < 0:
        raise BadRequestError(f"timeout={timeout}: give seconds from 0, or None", field="timeout")
    return timeout if block else 0.0


def _single(items: list[Any]) -> Any:
    if not items:
        raise Empty
    return items[0]
