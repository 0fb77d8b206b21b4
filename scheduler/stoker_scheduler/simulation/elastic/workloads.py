"""Workloads: jobs of the models of a profile, by the time of their submission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_scheduler.simulation.elastic.profiles import Model, Table
from stoker_scheduler.simulation.inputs import InputError
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True, slots=True)
class WorkloadJob:
    """One row: ``replicas`` and ``batch`` are what its user has tuned, for policies that cannot choose."""

    name: str
    submitted_s: int
    model: Model
    replicas: int
    batch: int


def read_workload(path: Path, models: Mapping[str, Model], gpus: int) -> list[WorkloadJob]:
    """Return the jobs of a file, by their submission. Raises InputError, with the line and the fix.

    ``gpus`` is what the cluster has: a job that asks for more would never end.
    """
    table = Table(path, COLUMNS)
    jobs: list[WorkloadJob] = []
    names: dict[str, int] = {}
    for line, row in table:
        name, application = row["name"], row["application"]
        if name in names:
            raise InputError(f"{path}:{line}: name is {name!r}, as in line {names[name]}")
        names[name] = line
        if application not in models:
            raise InputError(
                f"{path}:{line}: application is {application!r}, of which there are no profiles\n"
                f"{suggestion(application, models)}"
            )
        submitted_s = table.integer(line, row, "time")
        if jobs and submitted_s < jobs[-1].submitted_s:
            raise InputError(
                f"{path}:{line}: time is {submitted_s}, before {jobs[-1].submitted_s} of the line above: "
                "sort the jobs by time"
            )
        model = models[application]
        replicas = table.integer(line, row, "num_replicas", 1)
        batch = table.integer(line, row, "batch_size", 1)
        if replicas > gpus:
            raise InputError(
                f"{path}:{line}: num_replicas is {replicas}, and the cluster has {gpus} GPUs: {name} would "
                "never end"
            )
        if not model.limits.min_batch <= batch <= model.limits.max_batch:
            raise InputError(
                f"{path}:{line}: batch_size is {batch}, not {model.limits.min_batch} to "
                f"{model.limits.max_batch} as {application} allows"
            )
        jobs.append(WorkloadJob(name, submitted_s, model, replicas, batch))
    return jobs
