"""Policies for common cases: what many would write first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stoker_train.elastic.policies.policy import Actions, Metrics, Policy

if TYPE_CHECKING:
    from stoker_train.elastic.sync import Strategy


class BatchFromNoise(Policy):
    """Grow the batch with the noise scale: where ``phi > ratio * M``, M becomes ``factor`` times as large.

    At M = phi a step makes half the progress of one over all samples (McCandlish et al., 2018): beyond,
    samples are wasted. Checked every ``every`` steps, up to ``max_batch``; it never shrinks.
    """

    def __init__(
        self, max_batch: int, *, ratio: float = 2.0, factor: float = 2.0, every: int = 100
    ) -> None:
        for name, value, least in (("ratio", ratio, 0.0), ("factor", factor, 1.0)):
            if not value > least:
                raise ValueError(f"{name} is {value}: it must be more than {least:g}")
        if every < 1 or max_batch < 1:
            raise ValueError(f"every is {every}, max_batch {max_batch}: both must be 1 or more")
        self.max_batch, self.ratio, self.factor, self.every = max_batch, ratio, factor, every
        self._next = every

    def after_step(self, metrics: Metrics, actions: Actions) -> None:
        """Ask for a larger batch if the noise is above it."""
        if metrics.step < self._next:
            return
        self._next = metrics.step + self.every
        if metrics.gns > self.ratio * metrics.batch and metrics.batch < self.max_batch:
            batch = min(self.max_batch, math.ceil(metrics.batch * self.factor))
            actions.set_batch_size(
                batch, f"noise scale {metrics.gns:.4g} > {self.ratio:g} x {metrics.batch}"
            )


class EarlyGrowth(Policy):
    """Ask for more replicas early: ``factor`` times as many every ``every_s`` while each still pays.

    A growth pays if samples per second rose by ``least`` of what perfect scaling had given (Or et al.,
    MLSys 2020: stop where the marginal worth of a worker falls below a threshold). After one that did not,
    it goes back, and stays.
    """

    def __init__(
        self, max_replicas: int, *, factor: int = 2, every_s: float = 30.0, least: float = 0.5
    ) -> None:
        if max_replicas < 1 or factor < 2:
            raise ValueError(
                f"max_replicas is {max_replicas}, factor {factor}: they must be 1 and 2 or more"
            )
        if not 0.0 < least <= 1.0:
            raise ValueError(f"least is {least}: it must be above 0, and 1 at most")
        self.max_replicas, self.factor = max_replicas, factor
        self.every_s, self.least = every_s, least
        self.done = False
        self._since_s: float | None = None
        self._replicas = 0
        self._times: list[float] = []
        self._before: tuple[int, float] | None = None

    def after_step(self, metrics: Metrics, actions: Actions) -> None:
        """Compare the speed with the one before the last growth, and ask for the next."""
        if self._since_s is None or metrics.replicas != self._replicas:
            self._since_s, self._replicas, self._times = metrics.elapsed_s, metrics.replicas, []
            return
        if metrics.step_s and max(metrics.step_s) > 0:
            self._times.append(metrics.batch / max(metrics.step_s))
        if self.done or not self._times or metrics.elapsed_s - self._since_s < self.every_s:
            return
        speed = sorted(self._times)[len(self._times) // 2]
        self._since_s, self._times = metrics.elapsed_s, []
        if self._before is not None and metrics.replicas > self._before[0]:
            replicas, before = self._before
            worth = (speed / before - 1.0) / (metrics.replicas / replicas - 1.0)
            if worth < self.least:
                self.done = True
                actions.resize(replicas, f"the last growth gave {worth:.0%} of what it cost")
                return
        self._before = (metrics.replicas, speed)
        target = min(self.max_replicas, metrics.replicas * self.factor)
        if target > metrics.replicas:
            actions.resize(target, f"{speed:.4g} samples/s on {metrics.replicas} replicas")
        else:
            self.done = True


class SyncSwitchOnLoss(Policy):
    """Change the synchronisation strategy once the smoothed loss is below ``below``; once only.

    Dense exchange while the loss falls fast, local steps after it (post-local SGD, Lin et al., ICLR 2020,
    by loss rather than by step).
    """

    def __init__(
        self,
        below: float,
        strategy: Strategy | str | Mapping[str, Any],
        *,
        smoothing: float = 0.9,
    ) -> None:
        from stoker_train.elastic.sync import make_strategy

        if not 0.0 <= smoothing < 1.0:
            raise ValueError(f"smoothing is {smoothing}: it must be from 0, and less than 1")
        self.below, self.smoothing = below, smoothing
        self.strategy = make_strategy(strategy).spec()
        self.loss = math.nan
        self.switched = False

    def after_step(self, metrics: Metrics, actions: Actions) -> None:
        """Smooth the loss, and ask for the strategy when it is low enough."""
        if not math.isfinite(metrics.loss):
            return
        if math.isnan(self.loss):
            self.loss = metrics.loss
        self.loss = self.smoothing * self.loss + (1.0 - self.smoothing) * metrics.loss
        if not self.switched and self.loss < self.below:
            self.switched = True
            actions.set_sync(self.strategy, f"loss {self.loss:.4g} < {self.below:g}")


class Budget(Policy):
    """End training before it takes over ``gpu_hours``; from ``shrink_at``, a part of it, on few replicas.

    What the step that is running takes is counted by the last one's time.
    """

    def __init__(
        self, gpu_hours: float, *, shrink_at: float | None = None, min_replicas: int = 1
    ) -> None:
        if not gpu_hours > 0:
            raise ValueError(f"gpu_hours is {gpu_hours}: it must be above 0")
        if shrink_at is not None and not 0.0 < shrink_at < 1.0:
            raise ValueError(f"shrink_at is {shrink_at}: it must be between 0 and 1")
        self.gpu_hours, self.shrink_at, self.min_replicas = gpu_hours, shrink_at, min_replicas
        self.shrunk = False

    def after_step(self, metrics: Metrics, actions: Actions) -> None:
        """Ask for fewer replicas, or for the end."""
        step_s = max(metrics.step_s, default=0.0)
        next_hours = step_s * metrics.replicas / 3600.0
        if metrics.gpu_hours + next_hours >= self.gpu_hours:
            spent = f"{metrics.gpu_hours:.4g} of {self.gpu_hours:g} GPU-hours are spent"
            actions.request_stop(spent)
            return
        shrinks = self.shrink_at is not None and not self.shrunk
        if shrinks and metrics.gpu_hours >= (self.shrink_at or 1.0) * self.gpu_hours:
            self.shrunk = True
            actions.resize(self.min_replicas, f"{self.shrink_at:.0%} of the budget is spent")


class EvenOut(Policy):
    """Give a slow rank fewer samples, so that all end together; ``strategy`` instead, for a slow node.

    A slow node slows all that it exchanges with: with a ``strategy`` (such as local SGD) the others wait
    rarely.
    """

    def __init__(self, strategy: Strategy | str | Mapping[str, Any] | None = None) -> None:
        from stoker_train.elastic.sync import make_strategy

        self.strategy = None if strategy is None else make_strategy(strategy).spec()
        self._known: tuple[tuple[int, ...], tuple[str, ...], int] = ((), (), 0)

    def after_step(self, metrics: Metrics, actions: Actions) -> None:
        """Act where other ranks or nodes are slow than before: those that were have their part again."""
        seen = (metrics.slow_ranks, metrics.slow_nodes, metrics.replicas)
        if seen == self._known:
            return
        was_slow = any(self._known[:2])
        self._known = seen
        if metrics.slow_nodes and self.strategy is not None and metrics.sync == "all_reduce":
            actions.set_sync(self.strategy, f"slow nodes: {', '.join(metrics.slow_nodes)}")
        elif (was_slow or any(seen[:2])) and metrics.suggested_shares:
            slow = ", ".join(map(str, (*metrics.slow_ranks, *metrics.slow_nodes)))
            actions.set_shares(metrics.suggested_shares, f"slow: {slow}")
