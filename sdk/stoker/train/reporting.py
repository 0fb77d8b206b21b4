"""``stoker.train.report``: the values of a training step, for the dashboard's view of training.

Reports take the way of task records: into the spool file of this process's node, from where the nodelet
sends them to the gcs (:mod:`stoker_wire.data.training`). So they cost no request, those of a call are on
disk before its result leaves, and a gcs that is away, or a worker that ends, loses none. The way of
``stoker.util.metrics`` would not do: a nodelet has the last value of a metric only, and not for long.
"""

from __future__ import annotations

import operator
import re
import time
from typing import Any

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker.runtime import current
from stoker.runtime.process.training_reports import REPORTS
from stoker_wire.data.training import (
    MAX_METRICS,
    MAX_NAME,
    MAX_RUNS,
    MAX_STEP,
    METRIC_PATTERN,
    RUN_PATTERN,
    TrainingReport,
)

__all__ = ("report",)

_RUN, _METRIC = re.compile(RUN_PATTERN), re.compile(METRIC_PATTERN)
_known: dict[str, dict[str, set[str]]] = {}
"""The metrics of each run that this process has reported, of the job that it works for."""


def report(step: int, /, *, run: str = "default", **values: Any) -> None:
    """Report values of a training step, for ``stoker train runs`` and the dashboard's view *Training*.

    ::

        for step, batch in enumerate(batches):
            loss = train_on(batch)
            stoker.train.report(step, loss=loss, lr=schedule.get_last_lr()[0])

    For drivers, tasks and actors, from any thread; it takes some microseconds and waits for nobody. Values
    are numbers, or arrays and tensors of one; of a tensor on a GPU ``.item()`` waits for the GPU, so report
    every so many steps. NaN and infinity are kept. Have one rank report: of a step that is reported twice,
    as after a restart from a checkpoint, the later value stays. ``run`` tells apart several of one job.
    """
    number = _step(step)
    runtime = current.runtime()
    job = runtime.job
    numbers = {name: _number(name, value) for name, value in values.items()}
    _check(job.job_id, run, numbers)
    actor_id = job.actor.actor_id if job.actor is not None else ""
    one = TrainingReport(job.job_id, actor_id, run, number, time.time(), numbers)
    if REPORTS.add(one):
        runtime.io.call_soon(runtime.events.write_reports)


def _step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        raise WrongTypeError(
            f"step={step!r} of report() is no whole number\ngive the number of the step",
            field="step",
        ) from None
    if not 0 <= number <= MAX_STEP:
        raise BadRequestError(
            f"step={number} of report() is not in 0..{MAX_STEP}\ncount steps from 0", field="step"
        )
    return number


def _number(name: str, value: Any) -> float:
    kind = type(value)
    if kind is float:
        return value  # type: ignore[no-any-return]
    if kind is not int and kind is not str and kind is not bool:
        try:
            value = value.item() if hasattr(value, "item") else value
        except (ValueError, RuntimeError) as error:
            raise WrongTypeError(
                f"{name}= of report() is no single number\n{error}: give its mean, or another one",
                field=name,
            ) from None
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise BadRequestError(
                f"{name}= of report() is too large\ngive a number that a float can hold", field=name
            ) from None
    raise WrongTypeError(
        f"{name}={value!r} of report() is no number\n"
        "give an int, a float, or an array or tensor of one number",
        field=name,
    )


def _check(job_id: str, run: str, values: dict[str, float]) -> None:
    """Check the names; those that were reported before are known to be good."""
    runs = _known.get(job_id)
    if runs is None:
        _known.clear()  # a worker that goes on with another job
        runs = _known.setdefault(job_id, {})
    metrics = runs.get(run) if type(run) is str else None
    if metrics is not None and values and values.keys() <= metrics:
        return
    if not values:
        raise BadRequestError(
            "report() has no values\ngive some, as in report(step, loss=0.5)", field="values"
        )
    _check_name("run", "run", run, _RUN)
    for name in values:
        _check_name(name, "a metric", name, _METRIC)
    if metrics is None and len(runs) >= MAX_RUNS:
        raise BadRequestError(
            f"run={run!r}: this job has reported {MAX_RUNS} runs\ngive a name that it has",
            field="run",
        )
    together = (metrics or set()) | values.keys()
    if len(together) > MAX_METRICS:
        raise BadRequestError(
            f"run {run!r} would have {len(together)} metrics, of {MAX_METRICS} at most\n"
            "report fewer names, or means over some",
            field="values",
        )
    runs[run] = together


def _check_name(field: str, what: str, name: Any, pattern: re.Pattern[str]) -> None:
    if not isinstance(name, str) or len(name) > MAX_NAME or not pattern.fullmatch(name):
        raise BadRequestError(
            f"{what} of report() cannot be named {name!r:.80}\n"
            f"give up to {MAX_NAME} letters, digits and some of _ . : = @ -, a letter or digit first",
            field=field,
        )
