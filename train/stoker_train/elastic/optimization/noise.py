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

if TYPE_CHECKING:
    from stoker_train.elastic.optimization.table import StepTable

DECAY = 0.999
"""By which a step of M0 samples fades (AdaScale's ``1 - S / 1000`` a step, to first order)."""


class NoiseScale:
    """Smoothed |G|^2 and tr(Sigma), AdaScale's gain and ``tau``, the steps of M0 that were made.

    K >= 2 ranks with ``w_k`` of the samples each: ``small = sum_k(w_k |g_k|^2)`` is of ``M / K`` samples,
    whatever the shares, as ``E |g_k|^2 = |G|^2 + tr(Sigma) / (w_k M)``. One rank gives a small and a big
    batch of its own: a micro-batch and all of them, or a step's gradient and its mean with the one before
    (differenced).
    """

    def __init__(self, base_batch: int, decay: float = DECAY) -> None:
        from stoker_kernels.statistics import AdaScale, GradientNoiseScale

        self.base_batch = base_batch
        self._decay, self._unmeasured = decay, 0
        self._noise = GradientNoiseScale(decay=decay, base_batch=base_batch)
        self._ada = AdaScale(self._noise, base_batch)

    def update(self, table: StepTable) -> bool:
        """Add a step; returns whether it held a finite measurement. Advances ``tau`` by the step's gain.

        A step that is not finite is no progress.
        """
        if not table.finite:
            self._noise.skipped += 1
            return False
        pair = measured_pair(table)
        counted = False
        self._unmeasured += 1
        if pair is not None:
            # Steps that nobody measured fade what is known too.
            self._noise.decay, self._unmeasured = self._decay**self._unmeasured, 0
            small, big, small_batch, big_batch = pair
            counted = bool(
                self._noise.update(small, big, small_batch=small_batch, big_batch=big_batch)
            )
        if table.batch > 0:
            # Where ranks are rarely in touch a table stands for all the steps since the last one.
            steps = max(1.0, float(table.column("size").sum()) / table.batch)
            self._ada.tau += steps * self.gain_at(table.batch)
        return counted

    def gain_at(self, batch: float) -> float:
        """Return AdaScale's gain of a step of ``batch`` samples; 1 until something was measured."""
        gain = float(self._ada.gain_at(batch))
        return gain if math.isfinite(gain) else 1.0

    @property
    def tau(self) -> float:
        """The steps of M0 samples that this job's steps are worth; never falls."""
        return float(self._ada.tau)

    @property
    def measured(self) -> bool:
        """Whether there is an estimate."""
        return int(self._noise.updates) > 0

    @property
    def noise(self) -> GradientNoise | None:
        """|G|^2, and the variance of a gradient of M0 samples, for the scheduler; None before any."""
        if not self.measured:
            return None
        sqr = max(0.0, float(self._noise.signal))
        return GradientNoise(sqr, max(0.0, float(self._noise.noise)) / self.base_batch)

    @property
    def noise_scale(self) -> float:
        """phi = tr(Sigma) / |G|^2, in samples; NaN before any."""
        return float(self._noise.noise_scale)

    @property
    def skipped(self) -> int:
        """Steps that were not finite."""
        return int(self._noise.skipped)

    def state_dict(self) -> dict[str, Any]:
        """Return the smoothed sums, gain and tau."""
        return self._ada.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._ada.load_state_dict(dict(state))


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
