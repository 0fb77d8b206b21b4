"""The loader of an elastic loop: this rank's share of every step, as micro-batches.

``ctx.loader(dataset)`` makes one. It asks the replica for its share at the beginning of each step, and only
then: so a change of membership, of the batch or of the shares holds from one step to the next. What workers
have read ahead is dropped where it is no longer this rank's; nothing counts as used before ``ctx.step`` has
moved the cursor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from stoker.exceptions import BadRequestError, ConflictError
from stoker_train.elastic.core.sampler import micro_batches
from stoker_train.elastic.data.sources import Request, Source, source_of

if TYPE_CHECKING:
    from stoker_train.elastic.data.cursor import Cursor

__all__ = ("ElasticLoader", "MicroBatch", "StepPlan")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step as one rank sees it: ``count`` samples for all, its own are ``size`` from ``offset`` on.

    ``local`` is the most samples of one pass.
    """

    count: int
    offset: int
    size: int
    local: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The pass that the loop is at: ``size`` samples, number ``index`` ``of`` this rank's passes."""

    size: int
    index: int
    of: int

    @property
    def is_last(self) -> bool:
        """Whether gradients are exchanged in this pass, and the step ends with it."""
        return self.index == self.of - 1


class ElasticLoader:
    """Iterates over the rest of the cursor's epoch; see the module.

    ``plan()`` returns this rank's :class:`StepPlan` of the step at the cursor. ``empty_step()`` is called
    in place of the loop's body where the share has no samples: it takes part in the exchange and moves the
    cursor. A data set is map-style, a :class:`~stoker_train.elastic.data.sources.ShardedDataset`, or an
    iterable with a length. BadRequestError for one without a length, or with fewer samples than
    ``base_batch``. ``drop_last``: samples at the end of an epoch that make no whole ``base_batch`` are left
    out of it.

    It has no ``len()``: the steps of an epoch are not known before they are made.
    """

    def __init__(
        self,
        dataset: Any,
        cursor: Cursor,
        plan: Callable[[], StepPlan],
        *,
        seed: int = 0,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        device: torch.device | str | None = None,
        base_batch: int = 1,
        empty_step: Callable[[], None] | None = None,
        drop_last: bool = False,
    ) -> None:
        self._source = source_of(dataset, seed=seed, shuffle=shuffle)
        if self._source.length < base_batch:
            raise BadRequestError(
                f"the data set has {self._source.length} samples, fewer than base_batch={base_batch}\n"
                "give a smaller base_batch in Scaling(), or more data",
                field="base_batch",
            )
        self._cursor, self._plan, self._empty_step = cursor, plan, empty_step
        self._least = base_batch if drop_last else 1
        self._device = None if device is None else torch.device(device)
        self._ahead = _Ahead(self._source)
        self._last: _Pass | None = None
        pinned = self._device is not None and self._device.type == "cuda"
        self._loader: DataLoader[Any] = DataLoader(
            _Fetching(self._source),
            batch_size=None,
            sampler=self._ahead,
            collate_fn=collate_fn or default_collate,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=pinned,
            # Its own: a draw from the global one at each change of membership would change the model's.
            generator=torch.Generator().manual_seed(seed),
        )
        self._batches: Iterator[Any] | None = None
        self._micro = MicroBatch(0, 0, 0)
        self.data_s = 0.0
        """The seconds that this step has waited for data."""

    @property
    def samples(self) -> int:
        """The samples of an epoch."""
        return self._source.length

    @property
    def micro(self) -> MicroBatch:
        """The pass that the loop is at."""
        return self._micro

    def discard(self) -> None:
        """Drop what was read ahead."""
        self._batches = None

    def close(self) -> None:
        """End the workers; iterating again starts new ones."""
        self.discard()
        self._loader._iterator = None

    def __iter__(self) -> Iterator[Any]:
        epoch, cursor = self._cursor.epoch, self._cursor
        self.discard()
        while cursor.epoch == epoch and cursor.first + self._least <= self._source.length:
            plan, jumps, step = self._plan(), cursor.jumps, cursor.step
            if cursor.epoch != epoch:
                break  # an order at the epoch's beginning has ended it, or a loss has brought back another
            if plan.count < 1:
                raise ConflictError(f"the plan of step {cursor.step} has {plan.count} samples")
            self.data_s = 0.0
            if plan.size == 0:
                self.discard()
                self._micro = MicroBatch(0, 0, 1)
                if self._empty_step is None:
                    raise ConflictError(
                        f"step {cursor.step} has no samples for this rank\n"
                        "give the loader an empty_step, which takes part in the exchange"
                    )
                self._empty_step()
            else:
                yield from self._step(plan, jumps)
            if cursor.jumps == jumps and cursor.step == step:
                raise ConflictError(
                    f"the loop asked for more data before it had ended step {cursor.step}\n"
                    "call ctx.step() once for every batch, after its backward pass"
                )
        self.discard()

    def _step(self, plan: StepPlan, jumps: int) -> Iterator[Any]:
        """Yield this rank's batches of one step, up to where the job goes back to another one."""
        passes = micro_batches(plan.size, plan.local)
        for index, size in enumerate(passes):
            began = time.perf_counter()
            batch = self._next(plan, index)
            self.data_s += time.perf_counter() - began
            self._micro = MicroBatch(size, index, len(passes))
            yield batch
            if self._cursor.jumps != jumps:
                self.discard()
                return

    def _next(self, plan: StepPlan, index: int) -> Any:
        """Return pass ``index`` of the step: one that was read ahead if it is that, else a new one."""
        wanted = _Pass(self._cursor.epoch, self._cursor.first, plan, index)
        last = self._last
        if self._batches is None or last is None or last.following(self.samples) != wanted:
            self._ahead.first = wanted
            self._batches = iter(self._loader)
        batch = next(self._batches)
        self._last = wanted
        return _moved(batch, self._device)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass of this rank: number ``index`` of the step that begins at sample ``first`` of the epoch."""

    epoch: int
    first: int
    plan: StepPlan
    index: int

    def following(self, length: int) -> _Pass | None:
        """Return the pass after it if nothing changes; None where the epoch's last, shorter step would be."""
        if self.index + 1 < len(micro_batches(self.plan.size, self.plan.local)):
            return replace(self, index=self.index + 1)
        first = self.first + self.plan.count
        if first + self.plan.count > length:
            return None
        return replace(self, first=first, index=0)

    def request(self, source: Source) -> Request:
        """Return what to read for it."""
        sizes = micro_batches(self.plan.size, self.plan.local)
        start = self.first + self.plan.offset + sum(sizes[: self.index])
        return source.request(self.epoch, start, sizes[self.index])


class _Ahead(Sampler[Request]):
    """The requests from the pass ``first`` on; the DataLoader asks as far ahead as workers read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.first: _Pass | None = None

    def __iter__(self) -> Iterator[Request]:
        one = self.first
        while one is not None:
            yield one.request(self._source)
            one = one.following(self._source.length)


class _Fetching(Dataset[Any]):
    """A source as a data set of its requests, in the processes of the DataLoader's workers."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, request: Request) -> list[Any]:
        return self._source.fetch(request)


def _moved(batch: Any, device: torch.device | None) -> Any:
    """Return a batch with all its tensors on ``device``."""
    if device is None or device.type == "cpu":
        return batch
    if torch.is_tensor(batch):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _moved(one, device) for key, one in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(one, device) for one in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(one, device) for one in batch)
    return batch.to(device) if callable(getattr(batch, "to", None)) else batch
