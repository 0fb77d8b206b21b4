"""Measured profiles of models: how long their steps take, and what a batch is worth in each epoch.

A folder ``traces`` has one folder for each model::

    placements.csv      placement, local_bsz, step_time, sync_time
    scalability.csv     num_nodes, num_replicas, local_bsz, step_time, sync_time
    validation-<B>.csv  progress, iteration, metric, grad_sqr, grad_var; a row for each epoch

A placement has one digit for each node: the replicas there, in the order of the ring, as the smallest of its
rotations. The layout is that of the study of Pollux (OSDI 2021), as are two limits of models by their names.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_goodput.batches import BatchLimits
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import Floats
from stoker_scheduler.simulation.inputs import InputError

if TYPE_CHECKING:
    from pathlib import Path

MEASURED_NODES = 16
"""On more nodes a step takes as long as on so many."""
MAX_LOCAL = {"yolov3": 8}
"""The study's largest local batch of a model, where more was measured."""
FIXED_BATCH = {"ncf": 32768}
"""The study's total batch, on one GPU, of a model for which Pollux and Optimus choose nothing."""


class Table:
    """The rows of a CSV file, with errors that name file, line and column."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        try:
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                missing = [name for name in columns if name not in (reader.fieldnames or ())]
                if missing:
                    raise InputError(
                        f"{path}: there is no column {', '.join(map(repr, missing))}\n"
                        f"it needs {', '.join(columns)}"
                    )
                self.rows = list(reader)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}") from None
        if not self.rows:
            raise InputError(f"{path}: there are no rows")

    def __iter__(self) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield each row with its line."""
        return iter(enumerate(self.rows, 2))

    def number(self, line: int, row: Mapping[str, str], column: str, least: float = 0.0) -> float:
        """Return the number in a column. Raises InputError for what is none, or less than ``least``."""
        text = row[column]
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value) or value < least:
            raise InputError(
                f"{self.path}:{line}: {column} is {text!r}: it must be a number from {least:g} on"
            )
        return value

    def integer(self, line: int, row: Mapping[str, str], column: str, least: int = 0) -> int:
        """Return the whole number in a column. Raises InputError for anything else."""
        value = self.number(line, row, column, least)
        if value != int(value):
            raise InputError(f"{self.path}:{line}: {column} is {row[column]!r}, no whole number")
        return int(value)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a pass that ends in the exchange of gradients, and the part that waits for the exchange."""

    step_s: float
    sync_s: float

    @property
    def accumulation_s(self) -> float:
        """The seconds of a pass that only accumulates."""
        return self.step_s - self.sync_s

    def at_speed(self, speed: float) -> StepTime:
        """Return the times on GPUs that compute ``speed`` times as fast; the exchange takes as long."""
        if speed == 1.0:
            return self
        return StepTime(self.accumulation_s / speed + self.sync_s, self.sync_s)

    def whole_s(self, accumulated: int) -> float:
        """Return the seconds of a step with so many passes before its last."""
        return self.step_s + accumulated * self.accumulation_s


@dataclass(frozen=True)
class Model:
    """One model: its limits, its step times by placement, and its epochs.

    ``fixed_batch`` is the total batch of a model that Pollux and Optimus run on one GPU; 0 for any.
    """

    name: str
    limits: BatchLimits
    placements: Mapping[tuple[int, ...], Floats]
    """Placement -> rows of local batch, step and exchange seconds, by local batch."""
    scalability: Floats
    """Rows of nodes, replicas, local batch, step and exchange seconds."""
    batches: Floats
    """The total batches whose epochs were recorded, ascending."""
    goals: Floats
    """The progress at which each epoch ends, in steps of the smallest batch."""
    iterations: Floats
    """Steps by the end of each epoch; rows are batches."""
    sqr: Floats
    var: Floats
    fixed_batch: int = 0
    _steps: dict[tuple[tuple[int, ...], int], StepTime] = field(default_factory=dict, repr=False)

    @property
    def epochs(self) -> int:
        """Their number."""
        return len(self.goals)

    def step_time(self, placement: tuple[int, ...], local_batch: int) -> StepTime:
        """Return the times of a pass. Raises InputError, with both, where nothing was measured."""
        placement = smallest_rotation(placement)
        known = self._steps.get((placement, local_batch))
        if known is None:
            known = self._steps[placement, local_batch] = self._interpolated(placement, local_batch)
        return known

    def _interpolated(self, placement: tuple[int, ...], local_batch: int) -> StepTime:
        rows = self.placements.get(placement)
        if rows is not None:
            local, step, sync = rows.T
            if not local[0] <= local_batch <= local[-1]:
                raise self._hole(placement, local_batch)
            return StepTime(
                float(np.interp(local_batch, local, step)),
                float(np.interp(local_batch, local, sync)),
            )
        nodes = min(len(placement), MEASURED_NODES)
        step, sync = self._beyond(nodes, sum(placement), local_batch)
        if math.isnan(step):
            raise self._hole(placement, local_batch)
        return StepTime(float(step), float(sync))

    def _hole(self, placement: tuple[int, ...], local_batch: int) -> InputError:
        digits = "".join(map(str, placement)) if max(placement) < 10 else str(placement)
        return InputError(
            f"the profiles of {self.name} have no step time of placement {digits} with a local batch of "
            f"{local_batch}: measure it, or narrow the limits"
        )

    @cached_property
    def _beyond(self) -> Any:
        """Interpolates linearly between what was measured by nodes, replicas and local batch."""
        from scipy.interpolate import LinearNDInterpolator

        same: dict[tuple[int, int, float], list[tuple[float, float]]] = {}
        for placement, rows in self.placements.items():
            for local, step, sync in rows:
                same.setdefault((len(placement), sum(placement), local), []).append((step, sync))
        points = [(*key, *np.mean(times, axis=0)) for key, times in sorted(same.items())]
        table = np.array([*points, *self.scalability])
        interpolate = LinearNDInterpolator(table[:, :3], table[:, 3:])
        return lambda *point: np.ravel(interpolate(point))

    def noise(self, epoch: int, batch: float) -> GradientNoise:
        """Return the statistics of the gradient in an epoch, at a total batch."""
        return GradientNoise(
            float(np.interp(batch, self.batches, self.sqr[:, epoch])),
            float(np.interp(batch, self.batches, self.var[:, epoch])),
        )


def smallest_rotation(placement: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest rotation of a ring."""
    known = _ROTATIONS.get(placement)
    if known is None:
        turns = (placement[index:] + placement[:index] for index in range(len(placement)))
        known = _ROTATIONS[placement] = min(turns)
    return known


_ROTATIONS: dict[tuple[int, ...], tuple[int, ...]] = {}


def read_profiles(folder: Path) -> dict[str, Model]:
    """Return the models of a folder by name. Raises InputError, with the file and the fix."""
    traces = folder / "traces"
    names = (
        sorted(path.name for path in traces.iterdir() if path.is_dir()) if traces.is_dir() else []
    )
    if not names:
        raise InputError(f"{folder}: there is no folder traces/ with a folder for each model")
    return {name: _read_model(traces / name) for name in names}


def _read_model(folder: Path) -> Model:
    placements = _read_placements(folder / "placements.csv")
    table = Table(
        folder / "scalability.csv",
        ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"),
    )
    scalability = [
        (
            *(
                table.integer(line, row, name, 1)
                for name in ("num_nodes", "num_replicas", "local_bsz")
            ),
            *_times(table, line, row),
        )
        for line, row in table
    ]
    epochs = _read_epochs(folder)
    local = np.concatenate([rows[:, 0] for rows in placements.values()])
    most = MAX_LOCAL.get(folder.name, int(local.max()))
    batches = np.array(sorted(epochs), dtype=np.float64)
    rows = [epochs[batch] for batch in sorted(epochs)]
    try:
        limits = BatchLimits(int(batches[0]), int(batches[-1]), int(local.min()), most)
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from None
    return Model(
        name=folder.name,
        limits=limits,
        placements=placements,
        scalability=np.array(scalability, dtype=np.float64),
        batches=batches,
        goals=np.min([one[:, 0] for one in rows], axis=0),
        iterations=np.array([one[:, 1] for one in rows]),
        sqr=np.array([one[:, 2] for one in rows]),
        var=np.array([one[:, 3] for one in rows]),
        fixed_batch=FIXED_BATCH.get(folder.name, 0),
    )


def _times(table: Table, line: int, row: Mapping[str, str]) -> tuple[float, float]:
    step = table.number(line, row, "step_time", 1e-12)
    sync = table.number(line, row, "sync_time")
    if sync >= step:
        raise InputError(
            f"{table.path}:{line}: sync_time is {sync:g}, not less than step_time, {step:g}"
        )
    return step, sync


def _read_placements(path: Path) -> dict[tuple[int, ...], Floats]:
    table = Table(path, ("placement", "local_bsz", "step_time", "sync_time"))
    found: dict[tuple[int, ...], dict[int, tuple[float, float]]] = {}
    for line, row in table:
        digits = row["placement"]
        if not digits.isdecimal() or "0" in digits:
            raise InputError(
                f"{path}:{line}: placement is {digits!r}: it must be a digit from 1 to 9 for each node"
            )
        placement = smallest_rotation(tuple(map(int, digits)))
        local = table.integer(line, row, "local_bsz", 1)
        found.setdefault(placement, {})[local] = _times(table, line, row)
    return {
        placement: np.array([(local, *times[local]) for local in sorted(times)])
        for placement, times in found.items()
    }


def _read_epochs(folder: Path) -> dict[int, Floats]:
    """Return, by total batch, a row of progress, iteration, grad_sqr and grad_var for each epoch."""
    found: dict[int, Floats] = {}
    for path in sorted(folder.glob("validation-*.csv")):
        batch = path.stem.removeprefix("validation-")
        if not batch.isdecimal() or not int(batch):
            raise InputError(f"{path}: its name must end in a total batch, as validation-128.csv")
        columns = ("progress", "iteration", "grad_sqr", "grad_var")
        table = Table(path, columns)
        rows = np.array(
            [[table.number(line, row, name) for name in columns] for line, row in table]
        )
        falls = np.flatnonzero(np.diff(rows[:, 0], prepend=0.0) < 0)
        if len(falls):
            raise InputError(
                f"{path}:{falls[0] + 2}: progress falls: epochs must be in their order"
            )
        found[int(batch)] = rows
    if not found:
        raise InputError(f"{folder}: there is no file validation-<batch>.csv")
    lengths = {len(rows) for rows in found.values()}
    if len(lengths) > 1:
        raise InputError(
            f"{folder}: the files validation-*.csv have {sorted(lengths)} epochs, not as many each"
        )
    return found


def tightest(replicas: int, gpus_per_node: int) -> tuple[int, ...]:
    """Return the placement of so many replicas on the fewest nodes."""
    whole, rest = divmod(replicas, gpus_per_node)
    return (gpus_per_node,) * whole + ((rest,) if rest else ())
