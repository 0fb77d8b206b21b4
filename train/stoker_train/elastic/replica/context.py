"""The context of a loop: what ``loop(ctx)`` gets, and all that it needs of an elastic job.

A loop is an ordinary data-parallel PyTorch function, run by every replica in a thread of its own. All its
collectives go through the context, which is how the membership can change under it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import torch

import stoker.train
from stoker.exceptions import ConflictError
from stoker_train.elastic.core.ledger import Entry
from stoker_train.elastic.core.membership import Commit, Order, Resize, Stop, Suspend
from stoker_train.elastic.core.membership import SetSync as SetSyncOrder
from stoker_train.elastic.data.cursor import Cursor
from stoker_train.elastic.data.loader import ElasticLoader, MicroBatch, StepPlan
from stoker_train.elastic.replica.advice import Advice
from stoker_train.elastic.replica.engine import Engine, StopTraining
from stoker_train.elastic.replica.reports import Progress
from stoker_train.elastic.replica.settings import (
    LedgerTail,
    Settings,
    StrategyMemory,
    StrategyState,
)
from stoker_train.elastic.replica.steps import Steps
from stoker_train.elastic.state.train_state import TrainState
from stoker_train.elastic.sync import make_strategy

if TYPE_CHECKING:
    from stoker_train.elastic.options import Checkpoint, Scaling

__all__ = ("Context",)

_log = logging.getLogger(__name__)
_REPORT_STEPS = 64


class Context:
    """The replica of a loop, its state, its data and its steps."""

    def __init__(
        self,
        engine: Engine,
        scaling: Scaling,
        checkpoint: Checkpoint,
        *,
        sync: Any = None,
        policies: tuple[Any, ...] = (),
        seed: int = 0,
        local: int | None = None,
    ) -> None:
        self._engine = engine
        self._scaling, self._checkpoint, self._seed = scaling, checkpoint, seed
        self._cursor = Cursor()
        world = scaling.min_replicas
        high = scaling.locals[1]
        fits = max(1, min(high, math.ceil(scaling.base_batch / max(1, world))))
        self._settings = Settings(scaling.base_batch, local or fits)
        self._strategy = StrategyState(make_strategy(sync))
        self._tail = LedgerTail(max(1024, 2 * checkpoint.every))
        self._advice = Advice(policies, scaling)
        self._steps: Steps | None = None
        self._loader: ElasticLoader | None = None
        self._epoch = 0
        self._means = 0
        self._reported: dict[str, Any] = {}
        self._recorded: list[Entry] = []
        """Of a loop that records its samples itself: those that no report has told yet."""
        self.stopped = False
        """Whether the training is to end: epochs end early then."""
        engine.step_number = lambda: self._cursor.step
        engine.limit_local = self._limit_local
        engine.after_join = self._after_join

    # What it is.

    @property
    def rank(self) -> int:
        """This replica's rank in the present generation; it may change at a step."""
        return self._engine.rank

    @property
    def world_size(self) -> int:
        """The replicas of the present generation."""
        return self._engine.world_size

    @property
    def generation(self) -> int:
        """The number of the present generation."""
        return self._engine.generation

    @property
    def device(self) -> torch.device:
        """The device of this replica."""
        return self._engine.device

    @property
    def step_number(self) -> int:
        """The steps that were taken, over the whole job."""
        return self._cursor.step

    @property
    def epoch(self) -> int:
        """The epoch that the loop is in."""
        return self._epoch

    @property
    def batch(self) -> int:
        """M, the samples of a step over all replicas, as it is now."""
        return self._settings.batch

    @property
    def metrics(self) -> Any:
        """The numbers of the last step, see :class:`stoker_train.elastic.policies.Metrics`."""
        return self._advice.metrics(self._steps, self._engine, self._settings, self._cursor)

    # State and data.

    def state(
        self,
        *,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        max_norm: float | None = None,
        **objects: Any,
    ) -> TrainState:
        """Return the state of the training: all that survives a resize, a crash or a restart. Once per loop.

        ``scheduler`` is stepped by :meth:`step`. Gradients are clipped to ``max_norm`` where it is given.
        Other ``objects`` with ``state_dict`` and ``load_state_dict``, or plain values, are kept too.
        """
        if self._engine.state is not None:
            raise ConflictError("ctx.state() was called before\ncall it once, for all of the state")
        state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, **objects)
        parts: dict[str, Any] = {
            "elastic_cursor": self._cursor,
            "elastic_settings": self._settings,
            "elastic_strategy": self._strategy,
            "elastic_ledger": self._tail,
            "elastic_policies": self._advice,
            "elastic_fence": self._engine.fence,
        }
        if model is not None and optimizer is not None:
            self._steps = Steps(
                self._engine,
                self._scaling,
                self._checkpoint,
                self._cursor,
                self._settings,
                self._strategy,
                self._tail,
                model,
                optimizer,
                scheduler,
                max_norm,
            )
            self._steps.measures_links = bool(self._advice.policies)
            self._steps.share = self._share_policies
            parts["elastic_noise"] = self._steps.noise
            self._engine.open_group = self._steps.open
            self._engine.close_group = self._steps.close
            self._engine.settle = self._steps.settle
        for name, one in parts.items():
            state.register(name, one)
        state.register("elastic_memory", StrategyMemory(self._strategy), per_rank=True)
        self._engine.state = state
        return state

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        seed: int | None = None,
    ) -> ElasticLoader:
        """Return the loader of the training data: each sample of an epoch once, over all replicas."""
        self._loader = self._make_loader(
            dataset,
            shuffle=shuffle,
            collate_fn=collate_fn,
            num_workers=num_workers,
            seed=self._seed if seed is None else seed,
        )
        return self._loader

    def _make_loader(self, dataset: Any, **options: Any) -> ElasticLoader:
        loader = ElasticLoader(
            dataset,
            self._cursor,
            self._plan,
            device=self.device,
            base_batch=self._scaling.base_batch,
            empty_step=self._empty_step,
            **options,
        )
        self._own().length = loader.samples
        self._own().data_s = lambda: loader.data_s
        return loader

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs up to ``count``; a job that was interrupted goes on inside one."""
        self._join()
        self._advice.hook("before_train", self)
        while self._cursor.epoch < count and not self.stopped:
            self._epoch = self._cursor.epoch
            self._advice.hook("before_epoch", self)
            yield self._epoch
            self._advice.hook("after_epoch", self)
            if self._cursor.epoch == self._epoch and not self.stopped:
                self._cursor.begin_epoch(self._epoch + 1)
        self._advice.hook("after_train", self)

    def _own(self) -> Steps:
        if self._steps is None:
            raise ConflictError(
                "the loop has no state\ncall ctx.state(model=..., optimizer=...) before"
            )
        return self._steps

    def join(self) -> None:
        """Say that this replica is ready; come back once it is in a group, with the state of all.

        :meth:`epochs` and the loader do so by themselves.
        """
        if not self._engine.joined:
            self._engine.join()

    _join = join

    def _after_join(self) -> None:
        self._recorded = []
        if self._loader is None and self._tail.entries:
            self._take_over_recorded()
        elif self._engine.rank == 0 and self._steps is not None:
            # What the last rank 0 had not sent before it was gone.
            self._steps.entries = [
                one for one in self._tail.entries if one.step < self._cursor.step
            ]
            self._send_progress(urgent=False)

    def _take_over_recorded(self) -> None:
        """Go on from the entries of the state, of a loop that records its samples itself.

        They are sent once all ranks have committed them, so only a checkpoint may have fewer than the
        controller: an entry that is another than it knows, as it is confirmed in this generation, voids
        those that come after it.
        """
        entries = self._tail.entries
        last = entries[-1]
        if self._engine.durable_step == self._cursor.step and last.generation < self.generation:
            entries[-1] = msgspec.structs.replace(last, generation=self.generation)
        self._recorded = list(entries)
        self._send_progress(urgent=False)

    def record_samples(
        self, epoch: int, first: int, count: int, length: int, batch: int, lr: float
    ) -> None:
        """Add an entry to the ledger; for loops without :meth:`loader`, whose next :meth:`commit` ends it."""
        entries = self._tail.entries
        step = entries[-1].step + 1 if entries else 0
        entry = Entry(epoch, step, first, count, self.generation, batch, lr)
        self._tail.add(entry)
        self._tail.lengths[epoch] = length
        self._recorded.append(entry)

    # A step.

    def _share_policies(self) -> None:
        """Have all ranks keep the state of the policies, which rank 0 alone runs."""
        if not self._advice.policies or self.world_size == 1:
            return
        said = [self._advice.state_dict() if self.rank == 0 else None]
        torch.distributed.broadcast_object_list(said, 0)
        if self.rank != 0 and said[0] is not None:
            self._advice.load_state_dict(said[0])

    def _plan(self) -> StepPlan:
        self._join()
        self._apply_orders()
        self._advice.hook("before_step", self)
        return self._own().begin()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of a micro-batch's mean loss; the last one of a step exchanges them."""
        if self._loader is None:
            raise ConflictError("ctx.backward() needs ctx.loader()\niterate over its batches")
        self._own().backward(loss, self._micro)

    @property
    def _micro(self) -> MicroBatch:
        assert self._loader is not None
        return self._loader.micro

    def step(self, loss: Any = None, max_norm: float | None = None) -> bool:
        """End a micro-batch; the last one of a step updates the model on all ranks. Returns whether it did.

        Steps whose gradient is not finite are counted and not taken. ``loss`` is there for the reader:
        :meth:`backward` has taken note of it.
        """
        if not self._micro.is_last:
            return False
        if max_norm is not None:
            self._own().max_norm = max_norm
        return self._end_step(self._micro.of)

    def _empty_step(self) -> None:
        self._own().empty()
        self._end_step(1)

    def _end_step(self, passes: int) -> bool:
        steps = self._own()
        try:
            self._engine.check_lives()
            taken = steps.end(passes)
            epoch_ends = self._cursor.first >= steps.length
            if epoch_ends:
                self._cursor.begin_epoch(self._cursor.epoch + 1)
            steps.commit_if_due(epoch_ends=epoch_ends)
            if epoch_ends:
                # Nobody leaves an epoch before all have committed its end: none is gone back to later.
                steps.barrier()
        except Exception as error:
            self._recover(error)
            return False
        self._advice.hook("after_step", self)
        self._send_if_due(epoch_ends)
        if not epoch_ends:
            self._apply_orders()
        return taken

    def _apply_orders(self) -> None:
        for order in self._engine.take_orders():
            self._apply(order)

    def _apply(self, order: Order) -> None:
        _log.info("order %d at step %d: %s", order.number, self._cursor.step, order.kind)
        try:
            self._do(order)
        except Exception as error:
            self._recover(error)

    def _do(self, order: Order) -> None:
        action, steps = order.action, self._steps
        if isinstance(action, Resize):
            self._send_progress(urgent=True)
            self._engine.resize(order)
        elif isinstance(action, Suspend):
            self._send_progress(urgent=True)
            self._engine.suspend()
        elif isinstance(action, Stop):
            if steps is not None:
                steps.settle()
            self.stopped = True
            self._engine.save(wait=True)
            if self._loader is None:
                raise StopTraining(action.reason)
            self._cursor.begin_epoch(self._cursor.epoch + 1)
        elif isinstance(action, SetSyncOrder):
            if steps is not None:
                steps.settle()
                steps.close()
                self._strategy.switch(action)
                steps.open()
        elif isinstance(action, Commit):
            if steps is not None and self._engine.state is not None:
                steps.settle()
                self._engine.state.commit(self._cursor.step)
                self._engine.save()
        else:
            self._settings.apply(action)

    def _limit_local(self, local: int) -> None:
        self._settings.local = min(self._settings.local, local)

    # What it tells.

    def mean(self, value: float | torch.Tensor, weight: float = 1.0) -> float:
        """Return the mean of all ranks' values, each with its ``weight``, as its samples. A collective."""
        self._join()
        self._means += 1
        number = self._means
        total = float(value) * weight
        self._engine.pending_mean = (number, total, weight)
        result: float | None = None
        while result is None:
            try:
                sums = torch.tensor([total, weight], dtype=torch.float64)
                if self.world_size > 1:
                    self._engine.waits(lambda sums=sums: torch.distributed.all_reduce(sums))  # type: ignore[misc]
                result = float(sums[0] / sums[1])
            except Exception as error:
                self._recover(error)
                result = self._engine.resolved_means.pop(number, None)
        self._engine.pending_mean = None
        self._engine.means_done[number] = result
        return result

    def report(self, **values: Any) -> None:
        """Report values of this step: rank 0's are shown by ``stoker train runs``, and are in the result."""
        if self.rank != 0:
            return
        stoker.train.report(self.step_number, **values)
        self._reported.update({name: float(value) for name, value in values.items()})

    def commit(self) -> bool:
        """Commit in memory now; every rank calls it at the same step.

        In a loop that ends its steps otherwise than by :meth:`step` it ends one, and applies what the
        controller has ordered: True if the membership has changed by that.
        """
        state = self._engine.state
        if state is None:
            raise ConflictError("the loop has no state\ncall ctx.state() before")
        if self._steps is not None:
            self._steps.settle()
        if self._loader is not None:
            state.commit(self._cursor.step)
            return False
        self._cursor.advance(0)
        state.commit(self._cursor.step)
        if self._cursor.step % self._checkpoint.every == 0:
            self._engine.save()
        return self.check_orders()

    def check_orders(self) -> bool:
        """Apply what the controller has ordered; True if the membership has changed. A collective."""
        generation = self.generation
        try:
            self._engine.check_lives()
            self._engine.boundary()
            self._send_recorded()
            self._apply_orders()
        except Exception as error:
            self.recover(error)
        return generation != self.generation

    def recover(self, error: BaseException) -> None:
        """Come back at the last commit, in the next generation, if ``error`` came of a lost member.

        Any other error is raised again.
        """
        if isinstance(error, torch.OutOfMemoryError) or not self._engine.is_loss(error):
            raise error
        self._engine.recover(error)

    _recover = recover

    def _send_if_due(self, epoch_ends: bool) -> None:
        steps = self._own()
        if self.rank == 0 and steps.entries:
            self._send_progress(urgent=epoch_ends or len(steps.entries) >= _REPORT_STEPS)

    def _send_recorded(self) -> None:
        """Tell what all ranks have committed of the samples that the loop has recorded."""
        if self._recorded:
            self._send_progress(urgent=len(self._recorded) >= _REPORT_STEPS)

    def _send_progress(self, *, urgent: bool) -> None:
        recorded, self._recorded = self._recorded, []
        steps = self._steps
        if self.rank != 0 or (steps is None and not recorded):
            return
        values: dict[str, Any] = {
            "step": self._cursor.step,
            "epoch": self._epoch,
            "batch": self._settings.batch,
            "local": self._settings.local,
            "world_size": self.world_size,
        }
        said: dict[str, Any] = {}
        entries, tables = tuple(recorded), ()
        if steps is not None:
            entries, steps.entries = (*steps.entries, *recorded), []
            tables, steps.tables = tuple(steps.tables), []
            values["lr"] = steps.lr
            if steps.table is not None:
                values["loss"] = steps.table.loss
            noise = steps.noise.noise
            said = {"tau": steps.noise.tau}
            if noise is not None:
                said |= {"sqr": noise.sqr, "var": noise.var}
        if recorded:
            values |= {"epoch": recorded[-1].epoch, "lr": recorded[-1].lr}
        known = 0 if steps is None else steps.length
        lengths = {one.epoch: self._tail.lengths.get(one.epoch, known) for one in entries}
        self._engine.link.report(
            Progress(
                self._engine.link.worker,
                self.generation,
                entries,
                lengths,
                tables,
                values | self._reported,
                said,
                self._settings.skipped,
            ),
            urgent=urgent,
        )

    def finish(self) -> None:
        """End the loop: the last steps are told, and a checkpoint written."""
        if self._loader is not None:
            self._loader.close()
        self._send_progress(urgent=True)
        if self._engine.joined and self._engine.state is not None:
            self._engine.save(wait=True)
