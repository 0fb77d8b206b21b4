"""What changes of the membership cost: in memory, by checkpoint, and after a SIGKILL."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time

from benchmarks import resize_torchrun
from benchmarks.elastic_training import loops
from benchmarks.elastic_training.running import Running, cluster, gap_s, note, running
from benchmarks.results import Row

BATCH = 8
SAMPLE_S = 0.04
"""A sample's time beside its arithmetic, so that a second replica is worth having."""
IMPORTS = "import torch, torch.distributed, stoker, stoker_train.elastic.replica.context"


def p95(values: list[float]) -> float:
    """Return the value that 95 of 100 do not exceed, of few: the next higher one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)]


def _wide(parameters: int, replicas: tuple[int, int]) -> dict[str, object]:
    return {
        "replicas": replicas,
        "batch": BATCH,
        "parameters": parameters,
        "sample_s": SAMPLE_S,
    }


def in_memory(parameters: int, count: int) -> list[Row]:
    """Have a job grow and shrink in turn; its pause as the trainer and as its steps tell it."""
    gaps = []
    with cluster(2), running(loops.wide, **_wide(parameters, (1, 2))) as job:
        job.await_world(2)
        for number in range(count):
            found = job.resize(1 if number % 2 == 0 else 2)
            newest = max(one.generation for one in found)
            gaps.append(gap_s(found, newest))
            note(f"resize {number + 1}: {gaps[-1]:.2f} s from step to step")
        result = job.end()
    pauses = [one.pause_s for one in result.resizes if one.kind == "memory"]
    note(" ".join(f"{one.before}->{one.after}:{one.pause_s:.3f}" for one in result.resizes))
    return [
        Row("resize_in_memory_pause_p50", statistics.median(pauses), "s"),
        Row("resize_in_memory_pause_p95", p95(pauses), "s"),
        Row("resize_in_memory_step_to_step_p50", statistics.median(gaps), "s"),
        Row("resize_in_memory_step_to_step_p95", p95(gaps), "s"),
        Row("resizes_in_memory", len(pauses), ""),
    ]


def by_torchrun(parameters: int, count: int) -> list[Row]:
    """The same of torchrun, whose second node joins."""
    pauses = []
    for _ in range(count):
        pauses.append(resize_torchrun.pause_s(parameters))
        note(f"torchrun: {pauses[-1]:.2f} s from step to step")
    return [
        Row("resize_torchrun_step_to_step_p50", statistics.median(pauses), "s"),
        Row("resize_torchrun_step_to_step_worst", max(pauses), "s"),
    ]


def process_start_s() -> float:
    """Return the seconds in which a Python starts that imports what a replica needs."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.monotonic() - began


def by_checkpoint(parameters: int, count: int) -> list[Row]:
    """Restart a job of two replicas from a checkpoint, beside what it takes to start a process."""
    gaps, starts = [], []
    with cluster(2), running(loops.wide, **_wide(parameters, (1, 2))) as job:
        found = job.await_world(2)
        for _ in range(count):
            generation = max(one.generation for one in found)
            job.trainer.restart()

            def again(generation: int = generation) -> bool:
                return max(one.generation for one in job.lines()) > generation

            job.until(again, "it has restarted")
            found = job.await_world(2)
            last = max(one.at_s for one in found if one.generation == generation)
            first = min(one.at_s for one in found if one.generation > generation)
            gaps.append(first - last)
            starts.append(process_start_s())
            note(f"restart: {gaps[-1]:.2f} s from step to step, a process: {starts[-1]:.2f} s")
        result = job.end()
    told = [one.pause_s for one in result.resizes if one.kind == "checkpoint"]
    beyond = [gap - start for gap, start in zip(gaps, starts, strict=True)]
    return [
        Row("restart_by_checkpoint_step_to_step", statistics.median(gaps), "s"),
        Row("restart_by_checkpoint_told", statistics.median(told), "s"),
        Row("process_start", statistics.median(starts), "s"),
        Row("restart_by_checkpoint_beyond_process_start", statistics.median(beyond), "s"),
    ]


def after_a_kill(parameters: int, count: int) -> list[Row]:
    """Kill ranks in turn: time to the next step, to a step not made before, and the steps made again."""
    to_step, to_new, again = [], [], []
    with cluster(2), running(loops.wide, **_wide(parameters, (1, 2))) as job:
        for number in range(count):
            found = job.await_world(2, steps=15)
            killed = kill(job, number % 2)
            generation = max(one.generation for one in found)

            def after(generation: int = generation) -> list[loops.Line]:
                return [one for one in job.lines() if one.generation > generation]

            job.until(after, "a step after the kill")
            last = max(one.step for one in job.lines() if one.generation == generation)
            job.until(
                lambda last=last, after=after: any(one.step > last for one in after()),  # type: ignore[misc]
                "a step that is new",
            )
            lines = after()
            to_step.append(lines[0].at_s - killed)
            to_new.append(next(one.at_s for one in lines if one.step > last) - killed)
            again.append(max(0, last - lines[0].step + 1))
            note(
                f"rank {number % 2} killed: {to_step[-1]:.2f} s to a step, {to_new[-1]:.2f} s to a new "
                f"one, {again[-1]} again"
            )
        job.end()
    return [
        Row("sigkill_to_next_step_p50", statistics.median(to_step), "s"),
        Row("sigkill_to_next_step_worst", max(to_step), "s"),
        Row("sigkill_to_new_step_p50", statistics.median(to_new), "s"),
        Row("sigkill_to_new_step_worst", max(to_new), "s"),
        Row("sigkill_steps_made_again_worst", max(again), ""),
    ]


def kill(job: Running, rank: int) -> float:
    """SIGKILL a rank of the newest generation; returns when."""
    found = job.lines()
    newest = max(one.generation for one in found)
    pid = next(one.pid for one in reversed(found) if one.generation == newest and one.rank == rank)
    at_s = time.time()
    os.kill(pid, signal.SIGKILL)
    return at_s
