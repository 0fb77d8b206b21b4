"""``ray.util.iter``: iterators whose shards are actors. A generator (a task that yields) does with less."""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import stoker
from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.ray.mapping.lacking import attribute_error
from stoker.ray.mapping.local_iterator import (
    LocalIterator,
    Operators,
    Transform,
    shuffled,
    transformed,
)
from stoker.ray.mapping.remote import remote

T = TypeVar("T")
U = TypeVar("U")

__all__ = (
    "LocalIterator",
    "ParallelIterator",
    "ParallelIteratorWorker",
    "from_actors",
    "from_items",
    "from_iterators",
    "from_range",
)


def from_items(
    items: Sequence[T], num_shards: int = 2, repeat: bool = False
) -> ParallelIterator[T]:
    """Return an iterator over a list, dealt out to the shards in turn."""
    kind = type(items[0]).__name__ if items else "None"
    return from_iterators(
        [list(items[index::num_shards]) for index in range(num_shards)],
        repeat,
        f"from_items[{kind}, {len(items)}, shards={num_shards}{_repeated(repeat)}]",
    )


def from_range(n: int, num_shards: int = 2, repeat: bool = False) -> ParallelIterator[int]:
    """Return an iterator over ``range(n)``, of which each shard has a part."""
    size = n // num_shards
    bounds = [*(index * size for index in range(num_shards)), n]
    return from_iterators(
        [range(start, end) for start, end in itertools.pairwise(bounds)],
        repeat,
        f"from_range[{n}, shards={num_shards}{_repeated(repeat)}]",
    )


def from_iterators(
    generators: Sequence[Any], repeat: bool = False, name: str | None = None
) -> ParallelIterator[Any]:
    """Return an iterator with a shard for each iterable, or function that returns one."""
    worker = remote(ParallelIteratorWorker)
    actors = [worker.remote(each_one, repeat) for each_one in generators]
    return from_actors(
        actors, name or f"from_iterators[shards={len(generators)}{_repeated(repeat)}]"
    )


def from_actors(actors: Sequence[Any], name: str | None = None) -> ParallelIterator[Any]:
    """Return an iterator over actors whose class is derived of :class:`ParallelIteratorWorker`."""
    return ParallelIterator(
        [_Shards(tuple(actors), ())], name or f"from_actors[shards={len(actors)}]"
    )


def _repeated(repeat: bool) -> str:
    return ", repeat=True" if repeat else ""


class _Shards(NamedTuple):
    """Actors, and what each does with its items."""

    actors: tuple[Any, ...]
    transforms: tuple[Transform, ...]


class ParallelIterator(Operators[T]):
    """Items of actors, each of which applies the operators to its own.

    It can be sent to tasks and actors. Only one process at a time may read a shard.
    """

    def __init__(
        self, actor_sets: Sequence[_Shards], name: str, parent_iterators: Sequence[Any] = ()
    ) -> None:
        self.actor_sets = list(actor_sets)
        self.name = name
        self.parent_iterators = list(parent_iterators)
        """Whose actors must live as long as this."""

    def __iter__(self) -> Iterator[T]:
        raise WrongTypeError(
            "a ParallelIterator is not read by itself\nread gather_sync() or gather_async() of it"
        )

    def __repr__(self) -> str:
        return f"ParallelIterator[{self.name}]"

    def local_shuffle(
        self, shuffle_buffer_size: int, seed: int | None = None
    ) -> ParallelIterator[T]:
        """Return the items of each shard in another order: each is drawn from so many."""
        drawn = functools.partial(shuffled, shuffle_buffer_size, seed)
        text = f"local_shuffle(shuffle_buffer_size={shuffle_buffer_size}, seed={seed})"
        return self._with(drawn, text)

    def repartition(self, num_partitions: int, batch_ms: int = 0) -> ParallelIterator[T]:
        """Return an iterator with other shards, each of which reads its part of all these."""
        actors = _started(self.actor_sets)
        partitions = [
            functools.partial(_partition, actors, num_partitions, index, batch_ms)
            for index in range(num_partitions)
        ]
        name = f"{self.name}.repartition[num_partitions={num_partitions}]"
        parted = from_iterators(partitions, name=name)
        parted.parent_iterators = [self]
        return parted

    def gather_sync(self) -> LocalIterator[T]:
        """Return the items of all shards in turn."""
        gathered: LocalIterator[T] = self.batch_across_shards().flatten()
        gathered.name = f"{self}.gather_sync()"
        return gathered

    def batch_across_shards(self) -> LocalIterator[list[T]]:
        """Return lists with one item of each shard."""
        source = functools.partial(_rounds, self.actor_sets)
        return LocalIterator(source, name=f"{self}.batch_across_shards()")

    def gather_async(self, batch_ms: int = 0, num_async: int = 1) -> LocalIterator[T]:
        """Return the items of all shards as they come; so many requests are on their way to each.

        A shard answers with the items of ``batch_ms`` milliseconds, or with one.
        """
        _check_bounds(batch_ms, num_async)
        source = functools.partial(_as_ready, self.actor_sets, batch_ms, num_async)
        return LocalIterator(source, name=f"{self}.gather_async()")

    def take(self, n: int) -> list[T]:
        """Return the first ``n`` items, or those that are left."""
        return self.gather_sync().take(n)

    def show(self, n: int = 20) -> None:
        """Print the first ``n`` items."""
        self.gather_sync().show(n)

    def union(self, other: ParallelIterator[T]) -> ParallelIterator[T]:
        """Return an iterator with the shards of both."""
        if not isinstance(other, ParallelIterator):
            raise WrongTypeError(
                f"union() takes a ParallelIterator, not {type(other).__name__}", field="other"
            )
        return ParallelIterator(
            [*self.actor_sets, *other.actor_sets],
            f"ParallelUnion[{self}, {other}]",
            [*self.parent_iterators, *other.parent_iterators],
        )

    def select_shards(self, shards_to_keep: Sequence[int]) -> ParallelIterator[T]:
        """Return an iterator with these shards only."""
        if len(self.actor_sets) > 1 or not shards_to_keep:
            raise BadRequestError(
                "select_shards() takes one or more shards, and none of a union",
                field="shards_to_keep",
            )
        (shards,) = self.actor_sets
        kept = [actor for index, actor in enumerate(shards.actors) if index in shards_to_keep]
        return ParallelIterator(
            [_Shards(tuple(kept), shards.transforms)],
            f"{self}.select_shards({len(kept)} total)",
            self.parent_iterators,
        )

    def num_shards(self) -> int:
        """Return how many shards it has."""
        return sum(len(shards.actors) for shards in self.actor_sets)

    def shards(self) -> list[LocalIterator[T]]:
        """Return an iterator for each shard."""
        return [self.get_shard(index) for index in range(self.num_shards())]

    def get_shard(
        self, shard_index: int, batch_ms: int = 0, num_async: int = 1
    ) -> LocalIterator[T]:
        """Return an iterator over one shard, which can be sent to a task."""
        _check_bounds(batch_ms, num_async)
        found = [(actor, shards) for shards in self.actor_sets for actor in shards.actors]
        if not 0 <= shard_index < len(found):
            raise BadRequestError(
                f"there is no shard {shard_index} of {len(found)}", field="shard_index"
            )
        actor, shards = found[shard_index]
        source = functools.partial(_of_one, actor, shards.transforms, batch_ms, num_async)
        return LocalIterator(source, name=f"{self.name}.shard[{shard_index}]")

    def _with(self, transform: Transform, what: str) -> ParallelIterator[Any]:
        return ParallelIterator(
            [_Shards(s.actors, (*s.transforms, transform)) for s in self.actor_sets],
            f"{self.name}.{what}",
            self.parent_iterators,
        )


class ParallelIteratorWorker:
    """The base of the class of a shard's actor, whose ``__init__`` calls this one's.

    ``item_generator`` is an iterable, or a function that returns one; with ``repeat`` it begins anew at
    its end.
    """

    def __init__(self, item_generator: Any, repeat: bool) -> None:
        self.item_generator: Iterable[Any]
        if repeat:
            self.item_generator = _again_and_again(item_generator)
        else:
            self.item_generator = _made(item_generator)
        self._items: Iterator[Any] | None = None
        self._parts: defaultdict[int, deque[Any]] = defaultdict(deque)

    def par_iter_init(self, transforms: Sequence[Transform]) -> None:
        """Begin, with these operators."""
        self._items = iter(transformed(self.item_generator, transforms))
        self._parts.clear()

    def par_iter_next_batch(self, batch_ms: int) -> list[Any]:
        """Return the items of so many milliseconds, or one; none at the end."""
        return _in_time(self._begun(), batch_ms)

    def par_iter_slice_batch(self, step: int, start: int, batch_ms: int) -> list[Any]:
        """Return items of part ``start`` of ``step``, as :meth:`par_iter_next_batch` does."""
        return _in_time(self._part(step, start), batch_ms)

    def _part(self, step: int, start: int) -> Iterator[Any]:
        items = self._begun()
        while True:
            if not self._parts[start]:
                for index, item in enumerate(itertools.islice(items, step)):
                    self._parts[index].append(item)
            if not self._parts[start]:
                return
            yield self._parts[start].popleft()

    def _begun(self) -> Iterator[Any]:
        if self._items is None:
            raise BadRequestError("the shard has not begun\ncall par_iter_init() first")
        return self._items


def _made(item_generator: Any) -> Iterable[Any]:
    made: Iterable[Any] = item_generator() if callable(item_generator) else item_generator
    return made


def _again_and_again(item_generator: Any) -> Iterator[Any]:
    while True:
        items = iter(_made(item_generator))
        if items is item_generator:
            raise BadRequestError(
                f"{item_generator!r} ends once and cannot be repeated\ngive a function that makes it",
                field="item_generator",
            )
        yield from items


def _in_time(items: Iterator[Any], batch_ms: int) -> list[Any]:
    if not batch_ms:
        return list(itertools.islice(items, 1))
    end_s = time.monotonic() + batch_ms / 1000
    batch = list(itertools.islice(items, 1))
    while time.monotonic() < end_s:
        more = list(itertools.islice(items, 1))
        if not more:
            break
        batch += more
    return batch


def _check_bounds(batch_ms: int, num_async: int) -> None:
    if num_async < 1 or batch_ms < 0:
        raise BadRequestError(
            f"num_async={num_async}, batch_ms={batch_ms}: give at least 1, and at least 0",
            field="num_async" if num_async < 1 else "batch_ms",
        )


def _started(actor_sets: Sequence[_Shards]) -> list[Any]:
    """Let all actors begin; return them."""
    stoker.get(
        [
            actor.par_iter_init.remote(shards.transforms)
            for shards in actor_sets
            for actor in shards.actors
        ]
    )
    return [actor for shards in actor_sets for actor in shards.actors]


def _rounds(actor_sets: Sequence[_Shards]) -> Iterator[list[Any]]:
    active = _started(actor_sets)
    while active:
        found = stoker.get([actor.par_iter_next_batch.remote(0) for actor in active])
        active = [actor for actor, items in zip(active, found, strict=True) if items]
        if active:
            yield [items[0] for items in found if items]


def _as_ready(actor_sets: Sequence[_Shards], batch_ms: int, num_async: int) -> Iterator[Any]:
    actors = _started(actor_sets) * num_async
    return _answers([functools.partial(_next, actor, batch_ms) for actor in actors])


def _partition(actors: Sequence[Any], step: int, start: int, batch_ms: int) -> Iterator[Any]:
    return _answers([functools.partial(_slice, actor, step, start, batch_ms) for actor in actors])


def _next(actor: Any, batch_ms: int) -> Any:
    return actor.par_iter_next_batch.remote(batch_ms)


def _slice(actor: Any, step: int, start: int, batch_ms: int) -> Any:
    return actor.par_iter_slice_batch.remote(step, start, batch_ms)


def _answers(calls: Sequence[Callable[[], Any]]) -> Iterator[Any]:
    """Yield the items of calls as they are answered; each is made again until it has none."""
    pending = {call(): call for call in calls}
    while pending:
        ready, _ = stoker.wait(list(pending), num_returns=1)
        for ref in ready:
            call = pending.pop(ref)
            items = stoker.get(ref)
            if items:
                pending[call()] = call
            yield from items


def _of_one(
    actor: Any, transforms: Sequence[Transform], batch_ms: int, num_async: int
) -> Iterator[Any]:
    stoker.get(actor.par_iter_init.remote(transforms))
    pending = deque(_next(actor, batch_ms) for _ in range(num_async))
    while pending:
        items = stoker.get(pending.popleft())
        if items:
            pending.append(_next(actor, batch_ms))
        yield from items


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
