"""The steps of a replica: weigh losses, exchange gradients, update, agree, commit.

One :class:`Steps` per replica, driven by the context in the loop's thread. It knows the parts of a step and
their order; what they compute is theirs (:mod:`..sync`, :mod:`..optimization`, :mod:`..state`).
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from stoker_train.elastic.core.ledger import Entry
from stoker_train.elastic.optimization.learning_rate import lr_factor
from stoker_train.elastic.optimization.measuring import NoiseMeter, StepClock, numbers
from stoker_train.elastic.optimization.noise import NoiseScale
from stoker_train.elastic.optimization.table import StepRow, StepTable
from stoker_train.elastic.sync.exchange import GradientExchange
from stoker_train.elastic.sync.links import Links, measure_links
from stoker_train.elastic.sync.residuals import hand_on

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stoker_train.elastic.data.cursor import Cursor
    from stoker_train.elastic.data.loader import MicroBatch, StepPlan
    from stoker_train.elastic.options import Checkpoint, Scaling
    from stoker_train.elastic.replica.engine import Engine
    from stoker_train.elastic.replica.settings import LedgerTail, Settings, StrategyState

__all__ = ("Steps",)

_LINK_NBYTES, _LINK_REPEATS = 256 << 10, 2


class Steps:
    """A training's steps; ``optimizer`` is that of the state, ``scheduler`` its schedule, if it has one."""

    def __init__(
        self,
        engine: Engine,
        scaling: Scaling,
        checkpoint: Checkpoint,
        cursor: Cursor,
        settings: Settings,
        strategy: StrategyState,
        tail: LedgerTail,
        model: Any,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        max_norm: float | None,
    ) -> None:
        self.engine, self.scaling, self.checkpoint = engine, scaling, checkpoint
        self.cursor, self.settings, self.kind, self.tail = cursor, settings, strategy, tail
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.max_norm = max_norm
        engine.hand_on = self.hand_on
        self.noise = NoiseScale(scaling.base_batch)
        self.meter = NoiseMeter(optimizer)
        self.clock = StepClock(engine.device)
        self.params = [one for group in optimizer.param_groups for one in group["params"]]
        self._in_touch = True
        """Whether all ranks have met in the step that was made last."""
        self.share: Callable[[], None] = lambda: None
        """Has all ranks know what rank 0 alone keeps. A collective."""
        self.exchange: GradientExchange | None = None
        self.length = 0
        """Samples of an epoch."""
        self.plan: StepPlan | None = None
        self.table: StepTable | None = None
        self.entries: list[Entry] = []
        """Made since the last report."""
        self.tables: list[Any] = []
        self._loss: torch.Tensor | float = 0.0
        self._samples = 0.0
        self._began = time.monotonic()
        self._committed = 0
        """The step of the last commit, or of the group's beginning: the same on all ranks."""
        self.measures_links = False
        self.links: Links | None = None
        """As measured on this group."""
        self.data_s: Callable[[], float] = lambda: 0.0
        """The seconds that this step has waited for data."""

    # The group of a generation.

    def open(self) -> None:
        """Make what needs the process group of the new generation."""
        strategy = self.kind.strategy
        names = {id(one): name for name, one in self.model.named_parameters()}
        nodes = [one.node_id for one in self.engine.membership.members]  # type: ignore[union-attr]
        bucket_nbytes = getattr(strategy, "bucket_nbytes", 25 << 20)
        self.exchange = GradientExchange(
            [(names.get(id(one), str(n)), one) for n, one in enumerate(self.params)],
            None,
            bucket_nbytes,
            compressor=strategy.gradient_compressor(),
            nodes=nodes,
        )
        strategy.reset(self.exchange)
        self.optimizer.zero_grad(set_to_none=True)
        self._loss, self._samples = 0.0, 0.0
        self._committed = self.cursor.step
        self.links = None

    def close(self) -> None:
        """Let go of the old group."""
        if self.exchange is not None:
            exchange, self.exchange = self.exchange, None
            exchange.close()

    def settle(self) -> None:
        """Make all replicas equal."""
        if self.exchange is not None:
            exchange = self.exchange
            self.engine.waits(
                lambda: self.kind.strategy.settle(exchange, self.params, self.optimizer)
            )
            self.engine.waits(self.share)

    def hand_on(self, heirs: Mapping[int, int]) -> None:
        """Have ranks that leave hand on what their compressors keep back. On all ranks of the old group."""
        compressor = self.kind.strategy.compressor
        if heirs and compressor is not None:
            self.engine.waits(lambda: hand_on(compressor, heirs))

    # A step.

    def begin(self) -> StepPlan:
        """Return this rank's part of the step that begins."""
        left = self.length - self.cursor.first
        self.plan = self.settings.plan(self.engine.rank, self.engine.world_size, left)
        self.clock.start()
        return self.plan

    def backward(self, loss: torch.Tensor, micro: MicroBatch) -> None:
        """Add a micro-batch's gradient, weighted by its part of M."""
        plan, exchange = self.plan, self.exchange
        assert plan is not None and exchange is not None
        if micro.index == 0:
            self._begin_exchange(plan, exchange, micro.of)
        if micro.is_last:
            exchange.arm()
        (loss * (micro.size / plan.count)).backward()  # type: ignore[no-untyped-call]
        if micro.index == 0 and micro.of > 1:
            self.meter.first_pass(micro.size)
        self._loss = self._loss + loss.detach() * micro.size
        self._samples += micro.size
        self.clock.mark("compute")

    def _begin_exchange(self, plan: StepPlan, exchange: GradientExchange, passes: int) -> None:
        strategy, step, pace = self.kind.strategy, self.cursor.step, self.noise.pace
        exchange.begin(plan.size / plan.count, strategy.exchanges_gradients(step))
        # A step at whose end ranks are not in touch has no table.
        has_table = strategy.communicates(step)
        self.meter.begin(
            exchange,
            plan.size,
            plan.count,
            passes,
            measures=has_table and pace.is_due(),
            keeps=pace.is_due(int(has_table)),
        )

    def empty(self) -> None:
        """Take part in a step without samples of its own."""
        plan, exchange = self.plan, self.exchange
        assert plan is not None and exchange is not None
        self._begin_exchange(plan, exchange, 1)
        exchange.arm()

    def end(self, passes: int) -> bool:
        """Exchange, update, and agree with all ranks; returns whether the step was taken.

        Raises what the exchange raises where a rank is lost.
        """
        plan, exchange, strategy = self.plan, self.exchange, self.kind.strategy
        assert plan is not None and exchange is not None
        step = self.cursor.step
        self._in_touch = strategy.communicates(step)
        self.engine.waits(lambda: strategy.before_optimizer(exchange, self.params))
        self.clock.mark("exchange")
        norm = _total_norm(self.params)
        self.meter.before_optimizer(norm)
        # At once, and before the optimizer's step: on a GPU each read waits for all that is queued.
        length, loss, *squares = numbers([norm, self._loss, *self.meter.squares])
        taken = math.isfinite(length)
        if taken:
            self._update(norm)
        else:
            self.settings.skipped += 1
        self.engine.waits(
            lambda: strategy.after_optimizer(exchange, self.params, self.optimizer, step)
        )
        self.optimizer.zero_grad(set_to_none=True)
        row = self._row(plan, passes, loss, taken)
        self.meter.end(row, squares)
        if self._in_touch:
            self._agree(row)
        self._count(plan)
        return taken

    def _update(self, norm: torch.Tensor) -> None:
        if self.max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.params, self.max_norm, norm)
        # Of a whole step: the last one of an epoch is no other batch.
        size, gain = self.settings.batch, 1.0
        factor = self.settings.lr_factor
        if size != self.scaling.base_batch:
            gain = self.noise.gain_at(size)
            factor *= lr_factor(self.scaling.lr, size, self.scaling.base_batch, gain)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if self.scheduler is not None:
            self._schedule(gain)

    lr = 0.0

    def _schedule(self, gain: float) -> None:
        """Move the schedule: a step of its own, or as many as AdaScale says that this one is worth."""
        self.settings.schedule_credit += gain if self.scaling.lr == "adascale" else 1.0
        while self.settings.schedule_credit >= 1.0:
            self.settings.schedule_credit -= 1.0
            self.scheduler.step()

    def _row(self, plan: StepPlan, passes: int, loss: float, taken: bool) -> StepRow:
        seconds = self.clock.seconds()
        finite = taken and math.isfinite(loss)
        return StepRow(
            loss_sum=loss if math.isfinite(loss) else 0.0,
            size=self._samples if math.isfinite(loss) else 0.0,
            # The loop's own forward pass runs between the loader and the backward pass: what is not data.
            compute_s=max(0.0, seconds.get("compute", 0.0) - self.data_s()),
            exchange_s=seconds.get("exchange", 0.0),
            data_s=self.data_s(),
            passes=float(passes),
            share=float(plan.size),
            finite=float(finite),
            known_order=float(self.engine.link.known_order),
            elapsed_s=time.monotonic() - self._began,
            memory_nbytes=float(torch.cuda.max_memory_allocated())
            if self.engine.device.type == "cuda"
            else 0.0,
        )

    def _agree(self, row: StepRow) -> None:
        """Have every rank know the numbers of all."""
        mine = torch.from_numpy(row.vector())
        if self.engine.world_size == 1:
            rows = mine.numpy()[None].copy()
        else:
            gathered = torch.empty(self.engine.world_size * len(mine), dtype=torch.float64)
            self.engine.waits(lambda: dist.all_gather_into_tensor(gathered, mine))
            rows = gathered.numpy().reshape(self.engine.world_size, -1)
        self.table = StepTable(np.asarray(rows))
        self.noise.update(self.table)
        loss = self.table.loss
        if math.isfinite(loss):
            self.kind.strategy.observe(loss, self.table.elapsed_s)
        self.engine.agree(self.table.agreed_order)
        self._loss, self._samples = 0.0, 0.0
        if self.engine.rank == 0:
            self.tables.append(rows)
        if self.measures_links and self.links is None and self.engine.world_size > 1:
            # After a step of the new group, so that no resize waits for it.
            self.links = self.engine.waits(
                lambda: measure_links(nbytes=_LINK_NBYTES, repeats=_LINK_REPEATS)
            )

    def _count(self, plan: StepPlan) -> None:
        """Move the cursor: from here on the samples are used."""
        cursor = self.cursor
        entry = Entry(
            cursor.epoch,
            cursor.step,
            cursor.first,
            plan.count,
            self.engine.generation,
            self.settings.batch,
            self.lr,
        )
        self.tail.add(entry)
        self.tail.lengths[cursor.epoch] = self.length
        if self.engine.rank == 0:
            self.entries.append(entry)
        cursor.advance(plan.count)

    # Commits.

    def commit_if_due(self, *, epoch_ends: bool) -> None:
        """Commit in memory, and on disk, as often as asked; always where an epoch ends.

        At multiples of the intervals, or as soon after as ranks are in touch: all at the same steps.
        """
        step = self.cursor.step
        durable = self._has_passed(self.checkpoint.every)
        if not (epoch_ends or durable or self._has_passed(self.checkpoint.commit_every)):
            return
        if not (epoch_ends or self._in_touch):
            return
        self.settle()
        state = self.engine.state
        assert state is not None
        state.commit(step)
        self._committed = step
        if durable:
            self.engine.save()

    def _has_passed(self, interval: int) -> bool:
        """Return whether a multiple of ``interval`` steps was passed since the last commit."""
        return self.cursor.step // interval > self._committed // interval

    def barrier(self) -> None:
        """Return once every rank has come here."""
        if self.engine.world_size > 1:
            self.engine.boundary()


def _total_norm(params: list[torch.nn.Parameter]) -> torch.Tensor:
    grads = [one.grad for one in params if one.grad is not None]
    if not grads:
        return torch.zeros(())
    return torch.nn.utils.get_total_norm(grads)
