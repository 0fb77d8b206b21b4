"""The removal of what training has reported of jobs, in batches: a run may have millions of values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_gcs.state import schema
from stoker_gcs.store.changes import Between, Change, Delete

if TYPE_CHECKING:
    from stoker_gcs.state.records import StateStore
    from stoker_gcs.store.changes import Condition

BATCH = 5000
"""Rows of one transaction: others wait for it."""


async def remove_runs(state: StateStore, job_ids: tuple[str, ...]) -> None:
    """Remove the runs of jobs: the values first, so that a removal that is cut short can be done again."""
    of_jobs: dict[str, Condition] = {"job_id": job_ids}
    while rows := await state.store.select(schema.TRAINING_METRICS, of_jobs, limit=BATCH):
        for row in rows:
            await _remove_values(state, row["series"])
            key: dict[str, Condition] = {name: row[name] for name in schema.TRAINING_METRICS.key}
            await state.writer.apply(Change((Delete(schema.TRAINING_METRICS, key),)))
    await state.writer.apply(Change((Delete(schema.TRAINING_RUNS, of_jobs),)))


async def _remove_values(state: StateStore, series: int) -> None:
    table, where = schema.TRAINING_VALUES, {"series": series}
    columns = ("series", "width", "step")
    while rows := await state.store.select(table, where, limit=BATCH, columns=columns):
        width = rows[-1]["width"]
        steps = [row["step"] for row in rows if row["width"] == width]
        narrower = tuple({row["width"] for row in rows} - {width})
        gone: list[Delete] = [
            Delete(table, {**where, "width": width, "step": Between(0, steps[-1])})
        ]
        if narrower:
            gone.append(Delete(table, {**where, "width": narrower}))
        await state.writer.apply(Change(tuple(gone)))
