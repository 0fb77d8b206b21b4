"""The noise of the gradient, which says how large a batch still pays, from every step's table.

The formulas are :mod:`stoker_kernels.statistics`'. Every rank has one and updates it with the same tables, so
that AdaScale's gain is the same on all; the controller has its numbers from rank 0's reports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_goodput.efficiency import GradientNoise
from stoker_train.elastic.optimization.pacing import MeasurementPace

if TYPE_CHECKING:
    from stoker_train.elastic.optimization.table import StepTable

DECAY = 0.999
"""By which a step of M0 samples fades (AdaScale's ``1 - S / 1000`` a step, to first order)."""


class NoiseScale:
    """Smoothed |G|^2 and tr(Sigma), AdaScale's gain and ``tau``, the steps of M0 that were made.

    K >= 2 ranks with ``w_k`` of the samples each: ``small = sum_k(w_k |g_k|^2)`` is of ``M / K`` samples,
    whatever the shares, as ``E |g_k|^2 = |G|^2 + tr(Sigma) / (w_k M)``. One rank gives a small and a big
    batch of its own: a micro-batch and all of them, or a step's gradient and its mean with the one before
    (differenced). Plain numbers: it smooths as :class:`stoker_kernels.statistics.GradientNoiseScale` does,
    whose tensors would cost 40 times as much here.
    """

    def __init__(self, base_batch: int, decay: float = DECAY) -> None:
        self.base_batch = base_batch
        self.pace = MeasurementPace()
        """Which tables are to hold a measurement."""
        self.tau = 0.0
        """The steps of M0 samples that this job's steps are worth; never falls."""
        self.skipped = 0
        """Steps that were not finite."""
        self._decay = decay
        self._sums = [0.0, 0.0, 0.0]
        """The moving sums of |G|^2, of tr(Sigma), and of the weights given to both."""
        self._updates = 0
        self._faded = 0.0
        """Steps of M0 samples since the last measurement: also those without one fade what is known."""

    def update(self, table: StepTable) -> bool:
        """Add a step; returns whether it held a finite measurement. Advances ``tau`` by the step's gain.

        A step that is not finite is no progress.
        """
        self.pace.add(table)
        if not table.finite:
            self.skipped += 1
            return False
        batch = table.batch
        # Where ranks are rarely in touch a table stands for all the steps since the last one.
        steps = max(1.0, float(table.column("size").sum()) / batch) if batch > 0 else 0.0
        self._faded += steps * batch / self.base_batch
        pair = measured_pair(table)
        counted = pair is not None and self._add(pair)
        self.tau += steps * self.gain_at(batch)
        return counted

    def _add(self, pair: tuple[float, float, float, float]) -> bool:
        from stoker_kernels.statistics import estimate

        small, big, small_size, big_size = pair
        new = *estimate(small, big, small_size, big_size), 1.0
        if not all(math.isfinite(one) for one in new):
            self.skipped += 1
            return False
        decay, self._faded = self._decay**self._faded, 0.0
        self._sums = [
            decay * one + (1.0 - decay) * two for one, two in zip(self._sums, new, strict=True)
        ]
        self._updates += 1
        return True

    def gain_at(self, batch: float) -> float:
        """Return AdaScale's gain of a step of ``batch`` samples; 1 until something was measured.

        From 1 to S, the batch over M0; between S and 1 where that is less.
        """
        scale, noise = batch / self.base_batch, self.noise
        if noise is None or scale == 1.0 or scale <= 0.0:
            return 1.0
        return min(max(float(noise.gain(scale)), min(1.0, scale)), max(1.0, scale))

    @property
    def measured(self) -> bool:
        """Whether there is an estimate."""
        return self._sums[2] > 0.0

    @property
    def noise(self) -> GradientNoise | None:
        """|G|^2, and the variance of a gradient of M0 samples, for the scheduler; None before any."""
        if not self.measured:
            return None
        signal, noise, weight = self._sums
        return GradientNoise(max(0.0, signal / weight), max(0.0, noise / weight) / self.base_batch)

    @property
    def noise_scale(self) -> float:
        """phi = tr(Sigma) / |G|^2, in samples; inf where the noise hides the gradient, NaN before any."""
        if not self.measured:
            return math.nan
        signal, noise, _ = self._sums
        return max(0.0, noise) / signal if signal > 0.0 else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Return the smoothed sums, tau and the pace, as plain values."""
        noise = {"sums": list(self._sums), "updates": self._updates, "skipped": self.skipped}
        return {
            "tau": self.tau,
            "noise": noise,
            "faded": self._faded,
            "pace": self.pace.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; older checkpoints have tensors in it, and no pace."""
        noise = state["noise"]
        self.tau, self._sums = float(state["tau"]), [float(one) for one in noise["sums"]]
        self._updates, self.skipped = int(noise["updates"]), int(noise["skipped"])
        self._faded = float(state.get("faded", 0.0))
        if "pace" in state:
            self.pace.load_state_dict(state["pace"])


def measured_pair(table: StepTable) -> tuple[float, float, float, float] | None:
    """Return |g|^2 of a small and of a big batch, and their sizes in samples; None if not measured."""
    size, big_sizes = table.column("small_size"), table.column("big_size")
    has, whole = size > 0, np.flatnonzero(big_sizes > 0)
    if not has.any() or not len(whole):
        return None
    big, big_size = float(table.column("big_square")[whole[0]]), float(big_sizes[whole[0]])
    if int(has.sum()) == 1:
        small = float(table.column("small_square")[has][0])
        small_size = float(size[has][0])
    else:
        part = size[has] / size[has].sum()
        small = float(np.sum(part * table.column("small_square")[has]))
        small_size = float(size[has].sum() / has.sum())
    if not 0 < small_size < big_size:
        return None
    return small, big, small_size, big_size
