"""The table of a step: one row of numbers for each rank, which every rank has after its end.

The replica makes a :class:`StepRow` and gathers all ranks' (:meth:`StepRow.vector`, float64); what chooses
batches, measures noise or finds stragglers reads the :class:`StepTable`. Numpy only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stoker_goodput.throughput import Floats


@dataclass(slots=True)
class StepRow:
    """The numbers of one rank and step. Times are in seconds, sizes in samples; 0 where nothing is known."""

    loss_sum: float = 0.0
    """The mean loss of its samples, times their number; over all steps since the last table."""
    size: float = 0.0
    """Those samples."""
    compute_s: float = 0.0
    """The time of its forward and backward passes alone, in this step: no wait for others."""
    exchange_s: float = 0.0
    """How long it waited for the exchange after its last pass."""
    data_s: float = 0.0
    """How long it waited for data."""
    passes: float = 1.0
    """Its forward and backward passes."""
    share: float = 0.0
    """Its samples in this step."""
    small_square: float = 0.0
    """|g|^2 of the mean gradient of ``small_size`` samples of its own; see :mod:`.noise`."""
    small_size: float = 0.0
    """0: not measured in this step."""
    big_square: float = 0.0
    """|g|^2 of the mean gradient of ``big_size`` samples, the same on all ranks."""
    big_size: float = 0.0
    finite: float = 1.0
    """0 where its loss or gradient has an inf or NaN."""
    known_order: float = 0.0
    """The newest order that it knows."""
    elapsed_s: float = 0.0
    """Seconds of training by its own clock; rank 0's is everyone's."""
    memory_nbytes: float = 0.0
    """The most memory of its device that was in use."""
    noise_s: float = 0.0
    """The time that it took to measure the square sums; 0 where that was not done."""

    def vector(self) -> Floats:
        """Return the numbers in the order of ``STEP_FIELDS``, float64."""
        return np.array(_VALUES(self), dtype=np.float64)


STEP_FIELDS: tuple[str, ...] = tuple(field.name for field in fields(StepRow))
"""The columns of a table."""
_VALUES = attrgetter(*STEP_FIELDS)
_PLACES = {name: place for place, name in enumerate(STEP_FIELDS)}


class StepTable:
    """The rows of all ranks, in their order.

    Raises ValueError for rows of another length: a rank that runs another version of the code.
    """

    def __init__(self, rows: NDArray[np.float64]) -> None:
        if rows.ndim != 2 or rows.shape[1] != len(STEP_FIELDS):
            raise ValueError(
                f"the table has shape {rows.shape}, not (ranks, {len(STEP_FIELDS)}): "
                f"do all ranks run one version of Stoker?"
            )
        self.rows = rows

    @classmethod
    def of(cls, *rows: StepRow) -> StepTable:
        """Return the table of these rows."""
        return cls(np.stack([row.vector() for row in rows]))

    def column(self, name: str) -> Floats:
        """Return one number of each rank, by its name in ``STEP_FIELDS``."""
        return np.asarray(self.rows[:, _PLACES[name]])

    @property
    def replicas(self) -> int:
        """K, the number of ranks."""
        return len(self.rows)

    @property
    def batch(self) -> float:
        """M, the samples of this step on all ranks."""
        return float(self.column("share").sum())

    @property
    def loss(self) -> float:
        """The mean loss of all samples; NaN without any."""
        samples = float(self.column("size").sum())
        return float(self.column("loss_sum").sum()) / samples if samples else math.nan

    @property
    def finite(self) -> bool:
        """Whether no rank met an inf or NaN."""
        return bool((self.column("finite") > 0).all())

    @property
    def agreed_order(self) -> int:
        """The newest order that all ranks know."""
        return int(self.column("known_order").min())

    @property
    def elapsed_s(self) -> float:
        """Seconds of training by rank 0's clock."""
        return float(self.column("elapsed_s")[0])
