"""Runs of training, as the gcs answers them: with their newest values, and as curves."""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker_wire.data.training import MAX_METRICS, MAX_NAME, MAX_STEP
from stoker_wire.messages.common import Message, Record
from stoker_wire.messages.control import ListQuery, Order, Sort

Number = float | str | None
"""A value: a number, or ``nan``, ``inf`` or ``-inf``, which JSON has no numbers for."""


class TrainingRunsQuery(ListQuery):
    """Runs of one job, or of all that the caller sees; those that began last come first."""

    job_id: str = ""
    sort: Sort = Sort.CREATED
    order: Order = Order.DESC


class TrainingRun(Record):
    """A run of a job: its steps, when it reported, and the newest value of each metric.

    ``steps_per_s`` is that of the last reports, None while there are fewer than two. ``note`` says what is
    not kept, if something is not.
    """

    job_id: str
    run: str
    first_step: int
    last_step: int
    newest_step: int
    first_at_s: float
    newest_at_s: float
    steps_per_s: float | None
    newest: dict[str, Number]
    note: str = ""


class CurveQuery(Message):
    """The choice of metrics (separated by commas; all), about how many points, and a range of steps.

    ``to_step`` -1 is the last one.
    """

    metrics: Annotated[str, msgspec.Meta(max_length=MAX_METRICS * (MAX_NAME + 1))] = ""
    points: Annotated[int, msgspec.Meta(ge=2, le=2000)] = 500
    from_step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)] = 0
    to_step: Annotated[int, msgspec.Meta(ge=-1, le=MAX_STEP)] = -1


class Curve(Record):
    """A metric over the steps: what the values in each range of steps are.

    ``step`` is where a range begins, ``at_s`` when its last value was reported, ``mean`` is of the finite
    ones, and ``nans`` counts those that were no numbers. Ranges without values are left out.
    """

    step: tuple[int, ...]
    at_s: tuple[float, ...]
    mean: tuple[Number, ...]
    min: tuple[Number, ...]
    max: tuple[Number, ...]
    nans: tuple[int, ...]


class TrainingCurves(Record):
    """A run, and the curves of its metrics; each range has ``steps_per_point`` steps."""

    run: TrainingRun
    from_step: int
    to_step: int
    steps_per_point: int
    metrics: dict[str, Curve]
