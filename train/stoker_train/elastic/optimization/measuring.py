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
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from stoker_train.elastic.optimization.table import StepRow
    from stoker_train.elastic.sync.exchange import GradientExchange

Phase = Literal["compute", "exchange", "data", "noise", "other"]


class NoiseMeter:
    """The square sums that :class:`.noise.NoiseScale` needs, of the steps that its pace says.

    With K >= 2 ranks that exchange gradients: this rank's own before the exchange, and the sum after it.
    With one rank: the first micro-batch of several (:meth:`first_pass`), else the step before (which is
    kept: memory of one gradient). ``preconditioned`` (default: for optimizers with ``betas``) divides by
    Adam's denominators.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, preconditioned: bool | None = None
    ) -> None:
        self.optimizer = optimizer
        adam = all("betas" in group and "eps" in group for group in optimizer.param_groups)
        self.preconditioned = adam if preconditioned is None else preconditioned
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self._clock = StepClock(self._params[0].device if self._params else "cpu")
        self._kept_s = 0.0
        """What it has taken to keep gradients since the last measurement."""
        self._measures = self._keeps = False
        self._exchange: GradientExchange | None = None
        self._size = self._batch = 0.0
        self._first: tuple[torch.Tensor, float] | None = None
        self._small: torch.Tensor | None = None
        self._big: torch.Tensor | None = None
        self._sizes: tuple[float, float] | None = None
        """The samples of both; None where the step has no pair."""
        self._divided_by: Mapping[torch.Tensor, torch.Tensor] | None = None
        self._before: tuple[list[torch.Tensor], float] | None = None

    def begin(
        self,
        exchange: GradientExchange,
        size: float,
        batch: float,
        passes: int = 1,
        *,
        measures: bool = True,
        keeps: bool = True,
    ) -> None:
        """Begin a step: ``size`` of ``batch`` samples are this rank's, in ``passes``. Before any of them.

        Not ``measures``: its row is left without a measurement. ``keeps``: the next step may be measured,
        for which a rank that is alone keeps this one's gradient.
        """
        self._exchange, self._size, self._batch = exchange, size, batch
        self._first = self._small = self._big = self._sizes = self._divided_by = None
        alone = exchange.workers == 1
        self._measures = measures and (alone or exchange.sums_gradients)
        self._keeps = keeps and alone and passes == 1
        if not alone or passes > 1:
            self._before = None
        if not (self._measures or self._keeps):
            return
        self._clock.start()
        if self._measures and self.preconditioned:
            from stoker_kernels.statistics import adam_denominators

            self._divided_by = adam_denominators(self.optimizer)
        if self._measures and not alone:
            exchange.measure(self.local_square)
        self._clock.mark("noise")

    def local_square(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return |g|^2 of some parameters as they are now: of each bucket, before it is sent."""
        return self._square(params)

    def first_pass(self, micro_size: float) -> None:
        """Measure the gradient of the first of several micro-batches; only where this rank is alone."""
        exchange = self._exchange
        if self._measures and exchange is not None and exchange.workers == 1:
            # The loss was weighted: this is micro_size / batch times a mean gradient.
            scale = (self._batch / micro_size) ** 2
            self._first = (self._square(self._params) * scale, micro_size)

    @torch.no_grad()
    def before_optimizer(self, total_norm: torch.Tensor | float | None = None) -> None:
        """Measure the exchanged gradient, once it is there and not clipped; ``total_norm`` saves the pass.

        Without it, a plain sum that an optimizer of ours emits is read after its step, by :meth:`end`.
        """
        exchange = self._exchange
        if exchange is None or not (self._measures or self._keeps):
            return
        if exchange.workers == 1:
            if self._first is None:
                self._clock.mark("other")
                self._difference()
                self._clock.mark("noise")
            elif self._first[1] < self._batch:
                self._small, small_size = self._first
                self._sizes = small_size, self._batch
        elif exchange.local_square is not None:  # else it stayed local: it has no gradient of all
            if self._size > 0:
                self._small = exchange.local_square * (self._batch / self._size) ** 2
            self._sizes = self._size, self._batch * exchange.summed_share
        if self._sizes is None or self._big is not None:
            return
        if total_norm is not None and not self.preconditioned:
            self._big = torch.as_tensor(total_norm).double().square()
        elif self.preconditioned or getattr(self.optimizer, "grad_square_sums", 0) == 0:
            self._big = self._square(self._params)

    @property
    def squares(self) -> list[torch.Tensor]:
        """The squares that were measured before the optimizer's step, for one read with other numbers."""
        return [one for one in (self._small, self._big) if one is not None]

    def end(self, row: StepRow, squares: Sequence[float] | None = None) -> None:
        """Write the measurement to ``row``, after the optimizer's step.

        ``squares`` are the values of :attr:`squares`, if they were read: else the device is waited for.
        """
        exchange, self._exchange = self._exchange, None
        if exchange is None or not (self._measures or self._keeps):
            return
        self._kept_s += self._clock.seconds().get("noise", 0.0)
        if not self._measures:
            return
        row.noise_s, self._kept_s = self._kept_s, 0.0
        if self._sizes is None:
            return
        values = list(numbers(self.squares) if squares is None else squares)
        row.small_size, row.big_size = self._sizes
        if self._small is not None:
            row.small_square = values.pop(0)
        row.big_square = values.pop(0) if self._big is not None else float(self._emitted())

    def _square(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        from stoker_kernels.statistics import square_sums

        self._clock.mark("other")
        square = square_sums([params], self._divided_by).sum()
        self._clock.mark("noise")
        return square

    def _emitted(self) -> torch.Tensor:
        from stoker_kernels.statistics import optimizer_square_sums

        return optimizer_square_sums(self.optimizer).sum()

    def _difference(self) -> None:
        """Take two steps' gradients for the small batches, and their mean for the big one.

        Biased by how far G moved between them (as in AdaptDL, for a job on one GPU).
        """
        before, batch = self._before, self._batch
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        self._before = ([grad.clone() for grad in grads], batch) if self._keeps else None
        if not self._measures or before is None or before[1] != batch or not grads:
            return
        mean = torch._foreach_lerp(before[0], grads, 0.5)
        squares = [_sum_of_squares(self._divided(one)) for one in (before[0], grads, mean)]
        self._small, self._big = (squares[0] + squares[1]) / 2, squares[2]
        self._sizes = batch, 2 * batch

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


def numbers(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Return numbers that may lie on a device, which is waited for once."""
    if any(isinstance(value, torch.Tensor) and value.is_cuda for value in values):
        tensors = [torch.as_tensor(value, dtype=torch.float64) for value in values]
        device = next(one.device for one in tensors if one.is_cuda)
        read: list[float] = torch.stack([one.to(device) for one in tensors]).tolist()
        return read
    return [float(value) for value in values]


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
