"""The loss curve of a job with 1, 4, 2 and 3 replicas and two SIGKILLs beside an unbroken one, in float64."""

from __future__ import annotations

from benchmarks.elastic_training import loops
from benchmarks.elastic_training.resizing import kill
from benchmarks.elastic_training.running import WAIT_S, checked, cluster, note, running
from benchmarks.results import Row

BATCH = 16
EPOCHS = 30
SAMPLE_S = 0.02


def losses(found: list[loops.Line]) -> dict[int, float]:
    """Return the loss of each step, as it was when it was last made."""
    return {one.step: one.loss for one in found if one.rank == 0}


def curves(epochs: int = EPOCHS) -> list[Row]:
    """Compare the curves of an eventful run and of an unbroken one."""
    with cluster(1, nodes=4):
        with running(loops.curve, replicas=(1, 1), batch=BATCH, epochs=epochs, sample_s=0.0) as job:
            checked(job.trainer.result(WAIT_S))
            unbroken = losses(job.lines())
        note(f"unbroken: {len(unbroken)} steps")
        with running(
            loops.curve, replicas=(1, 4), batch=BATCH, epochs=epochs, sample_s=SAMPLE_S
        ) as job:
            job.resize(1)
            for world in (4, 2, 3):
                found = job.resize(world)
                note(f"{world} replicas at step {found[-1].step}")
                if world in (4, 3):
                    generation = max(one.generation for one in found)
                    kill(job, world // 2)
                    job.until(
                        lambda before=generation, job=job: job.lines()[-1].generation > before,  # type: ignore[misc]
                        "a step after the kill",
                    )
                    note(f"rank {world // 2} killed: on at step {job.lines()[-1].step}")
            result = checked(job.trainer.result(4 * WAIT_S))
            eventful = losses(job.lines())
    if unbroken.keys() != eventful.keys():
        raise SystemExit(f"{len(unbroken)} steps unbroken, {len(eventful)} eventful")
    worst = max(abs(eventful[n] / one - 1.0) for n, one in unbroken.items())
    return [
        Row("curve_steps", len(unbroken), ""),
        Row("curve_generations", result.generations, ""),
        Row("curve_greatest_relative_difference", worst, ""),
        Row("curve_ledger_exact", float(result.ledger_ok), ""),
    ]
