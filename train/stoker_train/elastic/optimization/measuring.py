"""Square sums of a replica's gradients, and the clock of its step: what the rows of a table are made from.

A replica's step calls these. They read each gradient once more at most, and wait for no device until
a number is asked for. A step::

    meter.begin(exchange, share_size)       # before the last backward pass; after the first one, see
    first_pass ...                                     # exchange, clipping (which knows the norm),
    optimizer.step() meter.end(row, total_norm=norm)
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from stoker_train.elastic.optimization.table import StepRow
    from stoker_train.elastic.sync.exchange import GradientExchange

MOST_COST = 0.01
"""The part of a step's time that its measurement may take, over many steps."""
RAREST = 64
_COSTS = 5

Phase = Literal["compute", "exchange", "data", "other"]


class NoiseMeter:
    """The square sums that :class:`.noise.NoiseScale` needs, of every ``every``-th step.

    ``every=None`` measures as often as costs 1 % of the steps' time.

    With K >= 2 ranks that exchange gradients: this rank's own before the exchange, and the sum after it.
    With one rank: the first micro-batch of several (:meth:`first_pass`), else the step before (which is
    kept: memory of one gradient). ``preconditioned`` (default: for optimizers with ``betas``) divides by
    Adam's denominators.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        preconditioned: bool | None = None,
        every: int | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every is {every}: it must be 1 or more")
        self.optimizer = optimizer
        self.every = 1 if every is None else every
        """Now: of so many steps one is measured."""
        self._adapts = every is None
        self._cost_s = 0.0
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._gaps: deque[float] = deque(maxlen=_COSTS)
        self._began_s: float | None = None
        adam = all("betas" in group and "eps" in group for group in optimizer.param_groups)
        self.preconditioned = adam if preconditioned is None else preconditioned
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self._steps = 0
        self._active = False
        self._exchange: GradientExchange | None = None
        self._size = self._batch = 0.0
        self._first: tuple[torch.Tensor, float] | None = None
        self._divided_by: Mapping[torch.Tensor, torch.Tensor] | None = None
        self._before: tuple[list[torch.Tensor], float] | None = None

    def begin(self, exchange: GradientExchange, size: float, batch: float, passes: int = 1) -> None:
        """Begin a step: ``size`` of ``batch`` samples are this rank's, in ``passes``. Before any of them."""
        self._pace()
        began = time.perf_counter()
        self._active = self._steps % self.every == 0
        self._steps += 1
        self._exchange, self._size, self._batch = exchange, size, batch
        self._first, self._divided_by = None, None
        if not self._active:
            return
        if self.preconditioned:
            from stoker_kernels.statistics import adam_denominators

            self._divided_by = adam_denominators(self.optimizer)
        if exchange.workers > 1:
            exchange.measure(lambda: self._divided_by)
        elif passes > 1:
            self._before = None
        self._cost_s += time.perf_counter() - began

    def first_pass(self, micro_size: float) -> None:
        """Measure the gradient of the first of several micro-batches; only where this rank is alone."""
        exchange = self._exchange
        if self._active and exchange is not None and exchange.workers == 1:
            began = time.perf_counter()
            # The loss was weighted: this is micro_size / batch times a mean gradient.
            scale = (self._batch / micro_size) ** 2
            self._first = (self._square() * scale, micro_size)
            self._cost_s += time.perf_counter() - began

    @torch.no_grad()
    def before_optimizer(self, total_norm: torch.Tensor | float | None = None) -> None:
        """Measure the exchanged gradient, once it is there and not clipped; ``total_norm`` saves the pass.

        Without it, a plain sum that an optimizer of ours emits is read after its step, by :meth:`end`.
        """
        self._big: torch.Tensor | None = None
        self._differenced: tuple[torch.Tensor, torch.Tensor] | None = None
        if not self._active:
            return
        began = time.perf_counter()
        if total_norm is not None and not self.preconditioned:
            self._big = torch.as_tensor(total_norm).double().square()
        elif self.preconditioned or getattr(self.optimizer, "grad_square_sums", 0) == 0:
            self._big = self._square()
        exchange = self._exchange
        if exchange is not None and exchange.workers == 1 and self._first is None:
            self._differenced = self._difference()
        self._cost_s += time.perf_counter() - began

    def end(self, row: StepRow) -> None:
        """Write the measurement to ``row``, after the optimizer's step. Here the device is waited for."""
        exchange, self._exchange = self._exchange, None
        if not self._active or exchange is None:
            return
        if self._differenced is not None:
            small, big = self._differenced
            row.small_square, row.small_size = float(small), self._batch
            row.big_square, row.big_size = float(big), 2 * self._batch
            return
        big_square = self._emitted() if self._big is None else self._big
        if exchange.workers == 1:
            if self._first is not None and self._first[1] < self._batch:
                row.small_square, row.small_size = float(self._first[0]), self._first[1]
                row.big_square, row.big_size = float(big_square), self._batch
            return
        if exchange.local_square is None:  # a step that stayed local has no gradient of all
            return
        row.big_square = float(big_square)
        row.big_size = self._batch * exchange.summed_share
        if self._size > 0:
            weight = self._size / self._batch
            row.small_square = float(exchange.local_square) / weight**2
            row.small_size = self._size

    def _pace(self) -> None:
        """Measure so rarely that it takes ``MOST_COST`` of the time of all steps, by the medians of both."""
        now = time.perf_counter()
        if self._began_s is not None:
            self._gaps.append(now - self._began_s)
            if self._active:
                self._costs.append(self._cost_s)
        self._began_s, self._cost_s = now, 0.0
        if self._adapts and len(self._costs) == _COSTS and self._gaps:
            part = median(self._costs) / max(median(self._gaps), 1e-9)
            # Of powers of 2 ranks choose the same one, but for a few steps.
            rarely = math.ceil(math.log2(max(1.0, part / MOST_COST)))
            self.every = min(RAREST, 2**rarely)

    def _square(self) -> torch.Tensor:
        from stoker_kernels.statistics import square_sums

        return square_sums([self._params], self._divided_by).sum()

    def _emitted(self) -> torch.Tensor:
        from stoker_kernels.statistics import optimizer_square_sums

        return optimizer_square_sums(self.optimizer).sum()

    def _difference(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Take two steps' gradients for the small batches, and their mean for the big one.

        Biased by how far G moved between them (as in AdaptDL, for a job on one GPU).
        """
        before, batch = self._before, self._batch
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        self._before = ([grad.clone() for grad in grads], batch)
        if before is None or before[1] != batch or not grads:
            return None
        mean = torch._foreach_lerp(before[0], grads, 0.5)
        squares = [_sum_of_squares(self._divided(one)) for one in (before[0], grads, mean)]
        return (squares[0] + squares[1]) / 2, squares[2]

    def _divided(self, grads: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self._divided_by is None:
            return grads
        divisors = [self._divided_by[param] for param in self._params]
        return list(torch._foreach_div(list(grads), divisors))


class StepClock:
    """The seconds of a step's phases: by CUDA events on a GPU, by the clock elsewhere.

    ``mark(phase)`` ends a phase, which began at the mark before; ``start()`` begins the step. Events are
    read by :meth:`seconds`, which waits for the device's last mark.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._events = self.device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """Begin a step."""
        self._marks = [("", self._now())]

    def mark(self, phase: Phase) -> None:
        """Say that what ran since the last mark was ``phase``."""
        if self._marks:
            self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase since :meth:`start`."""
        total: dict[str, float] = {}
        if self._events and self._marks:
            last = self._marks[-1][1]
            assert isinstance(last, torch.cuda.Event)
            last.synchronize()
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            total[phase] = total.get(phase, 0.0) + _between(before, after)
        return total

    def _now(self) -> float | torch.cuda.Event:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


def all_finite(values: Sequence[torch.Tensor | float]) -> bool:
    """Tell whether no value is inf or NaN; waits for the device."""
    return all(math.isfinite(float(value)) for value in values)


def _between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
        return float(before.elapsed_time(after)) / 1e3
    assert isinstance(before, float) and isinstance(after, float)
    return after - before


def _sum_of_squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norms = torch._foreach_norm(list(tensors), 2)
    return torch.stack([norm.double() for norm in norms]).square().sum()
