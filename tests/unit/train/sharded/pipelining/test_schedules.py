"""Schedules, for many pipelines: complete, without deadlock, as short as promised, in the order of torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.exceptions import BadRequestError
from stoker_train.planning.memory import in_flight
from stoker_train.planning.strategy import Strategy
from stoker_train.sharded.pipelining.schedules import (
    Action,
    Kind,
    Pass,
    forward_only,
    kind_of,
    schedule,
)
from stoker_train.sharded.pipelining.timeline import simulate
from tests.unit.train.sharded.pipelining.drawn import orders_of, pipelines


@settings(deadline=None)
@given(pipelines())
def test_each_stage_runs_each_micro_batch_once_in_each_direction(
    one: tuple[Kind, int, int, int],
) -> None:
    kind, pipeline, micro_batches, interleave = one
    for rank, order in enumerate(orders_of(*one)):
        stages = range(rank, pipeline * interleave, pipeline)
        wanted = [Action(way, s, m) for way in Pass for s in stages for m in range(micro_batches)]
        assert sorted(order) == sorted(wanted)
        for stage in stages:  # the last backward pass of a stage is that of the last micro-batch
            mine = [a.micro_batch for a in order if a.stage == stage and a.way is Pass.BACKWARD]
            assert mine == list(range(micro_batches))
        only = forward_only(kind, pipeline, micro_batches, rank, interleave)
        assert only == [action for action in order if action.way is Pass.FORWARD]


@settings(deadline=None)
@given(pipelines(), st.floats(0.5, 4.0), st.floats(0.5, 4.0))
def test_the_bubble_is_the_published_one(
    one: tuple[Kind, int, int, int], forward: float, backward: float
) -> None:
    """(p - 1) / (m v) of the work, each pass through a rank's layers taking ``interleave`` chunks."""
    _, pipeline, micro_batches, interleave = one
    timeline = simulate(orders_of(*one), forward / interleave, backward / interleave)
    work = micro_batches * (forward + backward)
    bubble = (pipeline - 1) / (micro_batches * interleave)
    short = max(0, pipeline - micro_batches)  # rounds that do not fill the pipeline wait longer
    bubble += short * (interleave - 1) / (micro_batches * interleave)
    assert timeline.total == pytest.approx(work * (1 + bubble))
    for rank in range(pipeline):
        assert timeline.bubble(rank) == pytest.approx(bubble)


@settings(deadline=None)
@given(pipelines())
def test_a_rank_keeps_as_many_micro_batches_as_the_planner_counts(
    one: tuple[Kind, int, int, int],
) -> None:
    kind, pipeline, micro_batches, interleave = one
    timeline = simulate(orders_of(*one))
    strategy = Strategy(pipeline=pipeline, micro_batches=micro_batches, interleave=interleave)
    for rank in range(pipeline):
        kept = timeline.in_flight(rank)
        if kind is Kind.GPIPE:
            assert kept == micro_batches
        elif kind is Kind.ONE_F_ONE_B:
            assert kept == min(pipeline - rank, micro_batches)
        if kind is not Kind.GPIPE and (kind is Kind.ONE_F_ONE_B or micro_batches % pipeline == 0):
            assert in_flight(rank, strategy) == pytest.approx(kept / interleave)


def test_ranks_that_wait_for_each_other_are_found() -> None:
    one, two = orders_of(Kind.ONE_F_ONE_B, 2, 2, 1)
    with pytest.raises(ValueError, match="wait for each other: rank 1 for 0F0, rank 0 for 1B1"):
        simulate([list(reversed(one)), two])


TORCH = """
import json, sys
from types import SimpleNamespace
from torch.distributed.pipelining import schedules as torchs

def one_f_one_b(pipeline, micro_batches, rank):
    # What it runs; its pipeline_order leaves the last rank's first micro-batch out.
    ran = []
    class Stage:
        group_rank = stage_index = rank
        num_stages = group_size = pipeline
        is_first, is_last = rank == 0, rank == pipeline - 1
        def __getattr__(self, name):
            return lambda *args, **kwargs: []
        def forward_one_chunk(self, number, *args, **kwargs):
            ran.append(f"{rank}F{number}")
        def backward_one_chunk(self, number, *args, **kwargs):
            ran.append(f"{rank}B{number}")
    schedule = torchs.Schedule1F1B(Stage(), micro_batches)
    schedule._initialize_stage = lambda *args: None
    schedule._maybe_compute_loss = schedule._maybe_get_loss = lambda *args: None
    schedule._update_losses = lambda *args: None
    schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches, None, [])
    return ran

def interleaved(pipeline, micro_batches, rank, interleave):
    rounds = max(1, micro_batches // pipeline)
    made = SimpleNamespace(
        n_local_stages=interleave, pp_group_size=pipeline, _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )
    calculate = torchs.ScheduleInterleaved1F1B._calculate_single_rank_operations
    return [str(action) for action in calculate(made, rank) if action is not None]

found = []
for pipeline, micro_batches, interleave in json.load(sys.stdin):
    for rank in range(pipeline):
        found.append(
            one_f_one_b(pipeline, micro_batches, rank) if interleave == 1
            else interleaved(pipeline, micro_batches, rank, interleave)
        )
print(json.dumps(found))
"""


def test_the_order_is_that_of_torch() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    cases = [
        (pipeline, micro_batches, interleave)
        for pipeline in (1, 2, 3, 4, 8)
        for micro_batches in (1, 2, 3, 4, 6, 8, 16)
        for interleave in (1, 2, 3)
        if (interleave == 1 and micro_batches >= pipeline)
        or (interleave > 1 and micro_batches % max(1, micro_batches // pipeline) == 0)
    ]
    # In a process of its own: it loads Triton.
    done = subprocess.run(
        [sys.executable, "-c", TORCH], input=json.dumps(cases), capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours = [
        [str(action) for action in schedule(kind_of(v), p, m, rank, v)]
        for p, m, v in cases
        for rank in range(p)
    ]
    assert ours == json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("zigzag", 2, 2, 0), "schedule"),
        (("1f1b", 0, 2, 0), "pipeline"),
        (("1f1b", 2, 0, 0), "micro_batches"),
        (("1f1b", 2, 2, 2), "rank"),
        (("1f1b", 2, 2, 0, 2), "interleave"),
        (("interleaved", 2, 2, 0), "interleave"),
        (("interleaved", 4, 9, 0, 2), "micro_batches"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(
    arguments: tuple[object, ...], field: str
) -> None:
    with pytest.raises(BadRequestError, match=field) as caught:
        schedule(*arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
