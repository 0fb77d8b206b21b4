"""``LocalIterator``: items of shards, read in one process, with operators over them."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import stoker
from stoker.exceptions import BadRequestError, WrongTypeError

T = TypeVar("T")
U = TypeVar("U")
Transform = Callable[[Iterable[Any]], Iterable[Any]]


class Operators(ABC, Generic[T]):
    """Base of iterators with operators over their items: each returns an iterator of its own kind."""

    name: str

    def transform(self, fn: Callable[[Iterable[T]], Iterable[U]]) -> Any:
        """Return the items that ``fn`` yields when it is called once with these."""
        return self._with(fn, "transform()")

    def for_each(
        self,
        fn: Callable[[T], U],
        max_concurrency: int = 1,
        resources: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return ``fn(item)`` for each item, of which so many run as tasks at once (1: where they are)."""
        return self._with(each(fn, max_concurrency, resources), "for_each()")

    def filter(self, fn: Callable[[T], Any]) -> Any:
        """Return the items for which ``fn(item)`` is true."""
        return self._with(functools.partial(filter, fn), "filter()")

    def batch(self, n: int) -> Any:
        """Return lists of ``n`` items; the last one may be shorter."""
        return self._with(functools.partial(batches, n), f"batch({n})")

    def flatten(self) -> Any:
        """Return the items of the items."""
        return self._with(itertools.chain.from_iterable, "flatten()")

    def combine(self, fn: Callable[[T], Iterable[U]]) -> Any:
        """Return the items of ``fn(item)`` for each item."""
        combined = self.for_each(fn).flatten()
        combined.name = f"{self.name}.combine()"
        return combined

    @abstractmethod
    def _with(self, transform: Transform, what: str) -> Any:
        """Return this iterator with one more transform, which is named in words."""


class LocalIterator(Operators[T]):
    """An iterator that begins at its first item; until then it can be sent to tasks and actors."""

    def __init__(
        self,
        source: Callable[[], Iterable[Any]],
        transforms: Sequence[Transform] = (),
        name: str = "unknown",
    ) -> None:
        self._source = source
        self._transforms = tuple(transforms)
        self._items: Iterator[T] | None = None
        self.name = name

    def __iter__(self) -> Iterator[T]:
        if self._items is None:
            self._items = iter(transformed(self._source(), self._transforms))
        return self._items

    def __next__(self) -> T:
        return next(iter(self))

    def __repr__(self) -> str:
        return f"LocalIterator[{self.name}]"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._items is not None:
            raise WrongTypeError(
                f"{self!r} has begun, and cannot be sent\nsend it before its first item is read"
            )
        return LocalIterator, (self._source, self._transforms, self.name)

    def shuffle(self, shuffle_buffer_size: int, seed: int | None = None) -> LocalIterator[T]:
        """Return the items in another order: each is drawn from so many."""
        drawn = functools.partial(shuffled, shuffle_buffer_size, seed)
        return self._with(drawn, f"shuffle(shuffle_buffer_size={shuffle_buffer_size}, seed={seed})")

    def union(
        self,
        *others: LocalIterator[T],
        deterministic: bool = False,
        round_robin_weights: Sequence[float] | None = None,
    ) -> LocalIterator[T]:
        """Return the items of this one and the others in turn, as many of each as its weight.

        In turn whether ``deterministic`` or not; a weight of ``"*"`` is 1.
        """
        parents = (self, *others)
        weights = round_robin_weights or [1] * len(parents)
        if len(weights) != len(parents):
            raise BadRequestError(
                f"union(): {len(weights)} weights for {len(parents)} iterators",
                field="round_robin_weights",
            )
        source = functools.partial(_in_turn, parents, [_per_turn(weight) for weight in weights])
        return LocalIterator(source, name=f"LocalUnion[{', '.join(map(str, parents))}]")

    def duplicate(self, n: int) -> list[LocalIterator[T]]:
        """Return ``n`` iterators, each with all items; what one has not read is kept for it."""
        if n < 2:
            raise BadRequestError(f"duplicate({n}): give 2 or more", field="n")
        copies = itertools.tee(self, n)
        return [
            LocalIterator(functools.partial(iter, copy), name=f"{self.name}.duplicate[{index}]")
            for index, copy in enumerate(copies)
        ]

    def take(self, n: int) -> list[T]:
        """Return the next ``n`` items, or those that are left."""
        return list(itertools.islice(self, n))

    def show(self, n: int = 20) -> None:
        """Print the next ``n`` items."""
        for item in self.take(n):
            sys.stdout.write(f"{item}\n")

    def _with(self, transform: Transform, what: str) -> LocalIterator[Any]:
        return LocalIterator(
            self._source, (*self._transforms, transform), name=f"{self.name}.{what}"
        )


def transformed(items: Iterable[Any], transforms: Iterable[Transform]) -> Iterable[Any]:
    """Return what comes out of the last of the transforms."""
    for transform in transforms:
        items = transform(items)
    return items


def each(
    fn: Callable[[Any], Any], max_concurrency: int, resources: Mapping[str, Any] | None
) -> Transform:
    """Return the transform that calls ``fn`` with each item, here or in tasks."""
    if max_concurrency < 0:
        raise BadRequestError(
            f"for_each(max_concurrency={max_concurrency}): give 0 (no limit) or more",
            field="max_concurrency",
        )
    if max_concurrency == 1:
        return functools.partial(map, fn)
    return functools.partial(_in_tasks, fn, max_concurrency, dict(resources or {}))


def _in_tasks(
    fn: Callable[[Any], Any], at_once: int, options: Mapping[str, Any], items: Iterable[Any]
) -> Iterator[Any]:
    from stoker.ray.mapping.remote import remote

    task = remote(fn).options(**options)
    running: list[stoker.ObjectRef[Any]] = []
    for item in items:
        if at_once and len(running) >= at_once:
            ready, running = stoker.wait(running, num_returns=1)
            yield from stoker.get(ready)
        running.append(task.remote(item))
    while running:
        ready, running = stoker.wait(running, num_returns=1)
        yield from stoker.get(ready)


def batches(n: int, items: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists of ``n`` items; the last one may be shorter."""
    left = iter(items)
    while batch := list(itertools.islice(left, n)):
        yield batch


def shuffled(buffer_size: int, seed: int | None, items: Iterable[T]) -> Iterator[T]:
    """Yield the items in another order: each is drawn from the next ``buffer_size``."""
    drawing = random.Random(seed)
    buffer: list[T] = []
    for item in items:
        buffer.append(item)
        if len(buffer) >= buffer_size:
            yield buffer.pop(drawing.randrange(len(buffer)))
    while buffer:
        yield buffer.pop(drawing.randrange(len(buffer)))


def _per_turn(weight: Any) -> int:
    return 1 if weight == "*" else max(1, round(weight))


def _in_turn(iterators: Sequence[Iterable[T]], counts: Sequence[int]) -> Iterator[T]:
    active = [(iter(items), count) for items, count in zip(iterators, counts, strict=True)]
    while active:
        still = []
        for items, count in active:
            taken = list(itertools.islice(items, count))
            yield from taken
            if len(taken) == count:
                still.append((items, count))
        active = still
