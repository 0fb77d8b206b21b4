"""Plots of studies, where matplotlib is there: who has the GPUs, completion times, a job's batch, rounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker_scheduler.simulation.elastic.figures import allocated_over_time

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from stoker_scheduler.simulation.elastic.study import Log


def can_plot() -> bool:
    """Return whether matplotlib is there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def plot_study(path: str, log: Log) -> None:
    """Draw one policy on one workload, into files whose names begin with ``path``."""
    with _Axes(f"{path}.allocations.svg", "hours", "GPUs", (9, 4)) as axes:
        times, models = allocated_over_time(log)
        hours = [at_s / 3600 for at_s in times]
        axes.stackplot(hours, *models.values(), labels=list(models))
        axes.legend(loc="upper right")
    with _Axes(f"{path}.jct.svg", "completion time, s", "part of the jobs") as axes:
        _draw_distribution(axes, [row.completion_s for row in log.jobs])
    with _Axes(
        f"{path}.policy.svg", "time of the policy for a round, ms", "part of the rounds"
    ) as axes:
        _draw_distribution(axes, [seconds * 1000 for seconds in log.policy_s])
    largest = max(log.jobs, key=lambda row: row.service_gpu_s).job
    rows = [row for row in log.rounds if row.job == largest]
    hours = [row.at_s / 3600 for row in rows]
    with _Axes(f"{path}.batch.svg", "hours", "samples of a step", (9, 4)) as axes:
        axes.step(hours, [row.batch for row in rows], where="post", label=f"batch of {largest}")
        axes.set_yscale("log")
        beside = axes.twinx()
        beside.step(hours, [row.efficiency for row in rows], where="post", color="tab:orange",
                    label="statistical efficiency")  # fmt: skip
        beside.set_ylim(0, 1.05)
        beside.set_ylabel("statistical efficiency")
        axes.figure.legend(loc="upper right")


def plot_loads(path: Path, results: Sequence[Mapping[str, Any]]) -> bool:
    """Draw mean completion times by the jobs of an hour; return whether there is more than one such load."""
    loads = sorted({one["jobs_per_h"] for one in results})
    if len(loads) < 2:
        return False
    with _Axes(str(path), "jobs submitted an hour", "mean completion time, s") as axes:
        for policy in dict.fromkeys(one["policy"] for one in results):
            of_load: dict[float, list[float]] = {}
            for one in results:
                if one["policy"] == policy:
                    of_load.setdefault(one["jobs_per_h"], []).append(one["mean_jct_s"])
            means = [statistics.fmean(of_load[load]) for load in loads]
            axes.plot(loads, means, marker="o", label=policy)
        axes.set_ylim(bottom=0)
        axes.legend()
    return True


class _Axes:
    """A figure with one pair of axes, saved at the end."""

    def __init__(self, path: str, x: str, y: str, inches: tuple[float, float] = (6, 4)) -> None:
        from matplotlib.figure import Figure

        self._path, self._figure = path, Figure(figsize=inches)
        self._axes: Axes = self._figure.add_subplot()
        self._axes.set_xlabel(x)
        self._axes.set_ylabel(y)

    def __enter__(self) -> Axes:
        return self._axes

    def __exit__(self, *_: object) -> None:
        self._figure.savefig(self._path)


def _draw_distribution(axes: Axes, values: Iterable[float]) -> None:
    ordered = sorted(values)
    axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post")
    axes.set_xscale("log")
