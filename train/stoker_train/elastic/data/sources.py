"""Data sets as positions of an epoch: map-style, by shard and offset, and plain iterables.

The loader asks a source for samples ``start`` to ``start + size`` of an epoch; a source knows which those
are. A request is made in the training process and may be served in a worker process of the DataLoader, so a
source keeps nothing that another must know.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from stoker.exceptions import BadRequestError
from stoker_train.elastic.core.sampler import epoch_order

__all__ = ("Request", "ShardedDataset", "Source", "source_of")

Request = tuple[int, Any]
"""The epoch, and what to read of it, as its source says it."""


@runtime_checkable
class ShardedDataset(Protocol):
    """A data set that is read in order, by shard, and from anywhere: an iterable that costs no more.

    ``shards()`` returns the number of samples of each shard; it does not change. ``read(shard, offset,
    count)`` yields ``count`` samples of a shard from ``offset`` on, the same ones whenever it is asked.
    With ``shuffle`` the shards of an epoch come in another order; shuffle within them beforehand.
    """

    def shards(self) -> Sequence[int]:
        """Return the number of samples of each shard."""

    def read(self, shard: int, offset: int, count: int) -> Iterable[Any]:
        """Yield ``count`` samples of ``shard`` from ``offset`` on."""


class Source(Protocol):
    """The samples of epochs, by their position."""

    length: int

    def request(self, epoch: int, start: int, size: int) -> Request:
        """Return what :meth:`fetch` needs for ``size`` samples from position ``start`` of ``epoch``."""

    def fetch(self, request: Request) -> list[Any]:
        """Return the samples, in order."""


def source_of(dataset: Any, *, seed: int, shuffle: bool) -> Source:
    """Return the source of a data set.

    BadRequestError for one without a length: epochs are counted, and each of its samples is used exactly
    once, so it must be known where one ends; and for ``shuffle`` of a plain iterable, whose order is its
    own.
    """
    if isinstance(dataset, ShardedDataset):
        return _Sharded(dataset, seed, shuffle)
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise BadRequestError(
            f"the data set {type(dataset).__name__} has no length\n"
            "give it __len__, or shards() and read() (stoker.train.ShardedDataset): epochs are counted",
            field="dataset",
        ) from None
    if hasattr(dataset, "__getitem__") and not _is_iterable_style(dataset):
        return _MapStyle(dataset, length, seed, shuffle)
    if shuffle:
        raise BadRequestError(
            f"shuffle=True for the iterable {type(dataset).__name__}, whose order is its own\n"
            "give shuffle=False and shuffle in it (set_epoch(epoch) is called), or give it shards() "
            "and read()",
            field="shuffle",
        )
    return _Iterated(dataset, length)


class _MapStyle:
    """A data set with ``__getitem__`` and ``__len__``; workers are sent indices, not the epoch's order."""

    def __init__(self, dataset: Any, length: int, seed: int, shuffle: bool) -> None:
        self.length = length
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._order: tuple[int, np.ndarray] | None = None

    def request(self, epoch: int, start: int, size: int) -> Request:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self.length, self._seed, epoch, self._shuffle)
        return epoch, self._order[1][start : start + size].tolist()

    def fetch(self, request: Request) -> list[Any]:
        _, indices = request
        many = getattr(self._dataset, "__getitems__", None)
        if many is not None:
            return list(many(indices))
        return [self._dataset[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}


class _Sharded:
    """A data set by shard and offset: an epoch is its shards one behind the other, in its own order."""

    def __init__(self, dataset: ShardedDataset, seed: int, shuffle: bool) -> None:
        self._dataset, self._seed, self._shuffle = dataset, seed, shuffle
        self._counts = [int(count) for count in dataset.shards()]
        self.length = sum(self._counts)
        self._places: tuple[int, list[int], np.ndarray] | None = None

    def request(self, epoch: int, start: int, size: int) -> Request:
        order, ends = self._order(epoch)
        parts: list[tuple[int, int, int]] = []
        position = start
        while position < start + size:
            place = int(np.searchsorted(ends, position, side="right"))
            shard = order[place]
            offset = position - (int(ends[place]) - self._counts[shard])
            count = min(self._counts[shard] - offset, start + size - position)
            parts.append((shard, offset, count))
            position += count
        return epoch, parts

    def fetch(self, request: Request) -> list[Any]:
        samples: list[Any] = []
        for shard, offset, count in request[1]:
            part = list(itertools.islice(self._dataset.read(shard, offset, count), count))
            if len(part) < count:
                raise _ended(
                    self._dataset, f"shard {shard} at {offset + len(part)}", self._counts[shard]
                )
            samples += part
        return samples

    def _order(self, epoch: int) -> tuple[list[int], np.ndarray]:
        if self._places is None or self._places[0] != epoch:
            order = epoch_order(len(self._counts), self._seed, epoch, self._shuffle).tolist()
            ends = np.cumsum([self._counts[shard] for shard in order])
            self._places = epoch, order, ends
        return self._places[1], self._places[2]


class _Iterated:
    """An iterable with a length: every rank reads all of it and keeps its share; right, seldom cheap.

    It must yield the same samples in the same order each time that it is begun, or after ``set_epoch`` of
    the same epoch where it has that.
    """

    def __init__(self, dataset: Any, length: int) -> None:
        self.length = length
        self._dataset = dataset
        self._epoch = -1
        self._position = 0
        self._iterator: Iterator[Any] = iter(())

    def request(self, epoch: int, start: int, size: int) -> Request:
        return epoch, (start, size)

    def fetch(self, request: Request) -> list[Any]:
        epoch, (start, size) = request
        if epoch != self._epoch or start < self._position:
            set_epoch = getattr(self._dataset, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            self._epoch, self._position, self._iterator = epoch, 0, iter(self._dataset)
        skipped = sum(1 for _ in itertools.islice(self._iterator, start - self._position))
        samples = list(itertools.islice(self._iterator, size))
        self._position += skipped + len(samples)
        if len(samples) < size:
            raise _ended(self._dataset, str(self._position), self.length)
        return samples

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": iter(()), "_epoch": -1, "_position": 0}


def _is_iterable_style(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def _ended(dataset: Any, where: str, length: int) -> BadRequestError:
    return BadRequestError(
        f"the data set {type(dataset).__name__} ended at sample {where} of {length}\n"
        "its length must be the number of samples that it has: each is used exactly once",
        field="dataset",
    )
