"""Sharded training on a running cluster: as one process, through losses, mistakes and changes of the plan."""

from __future__ import annotations

import random
from itertools import groupby
from typing import TYPE_CHECKING

import pytest

from stoker.exceptions import BadRequestError, GetTimeoutError
from stoker.train import ClusterShape, Failure, ShardedTrainer, Strategy
from tests.e2e.train.sharded import loops
from tests.e2e.train.sharded.conftest import WAIT_S
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Make = Callable[..., ShardedTrainer]

pytest.importorskip("torch")
STEPS_PER_EPOCH = 4


def as_one_process(folder: Path, steps: int, max_norm: float | None = None) -> None:
    """Check all that ranks have noted: losses and samples are those of one process, in all gangs."""
    from stoker_train.elastic.core.sampler import epoch_order

    epochs = steps // STEPS_PER_EPOCH
    expected = loops.alone(epochs, max_norm)
    found = sorted(loops.notes(folder), key=lambda one: one["step"])
    by_step = {step: list(ones) for step, ones in groupby(found, lambda one: one["step"])}
    assert sorted(by_step) == list(range(steps))
    for step, ones in by_step.items():
        epoch, place = divmod(step, STEPS_PER_EPOCH)
        order = epoch_order(loops.SAMPLES, 0, epoch, True)[place * loops.BATCH :][: loops.BATCH]
        shares = {one["data"]: one["seen"] for one in ones}
        assert [n for _, seen in sorted(shares.items()) for n in seen] == order.tolist()
        for one in ones:
            assert one["seen"] == shares[one["data"]], "ranks of one share, and all gangs"
            assert one["loss"] == pytest.approx(expected[step], rel=1e-5), (step, one)


@pytest.mark.parametrize(
    "plan", [Strategy(data=2), Strategy(data=2, zero=3, micro_batches=2)], ids=str
)
def test_a_gang_trains_as_one_process(plan: Strategy, trainer: Make, tmp_path: Path) -> None:
    one = trainer(plan, max_norm=1.0)
    result = one.fit(WAIT_S)
    assert not result.error
    assert (result.steps, result.restarts) == (8, 0)
    assert result.value == pytest.approx(loops.alone(2, 1.0), rel=1e-6)
    assert result.metrics["loss"] == pytest.approx(result.value[-1])
    as_one_process(tmp_path / "notes", 8, 1.0)
    progress = one.progress()
    assert progress["strategy"]["zero"] == plan.zero
    assert [rank["rank"] for rank in progress["ranks"]] == [0, 1]
    assert all(rank["node"].startswith("n_") for rank in progress["ranks"])


def test_a_killed_rank_has_the_gang_begin_anew_from_the_last_commit(
    trainer: Make, tmp_path: Path, seed: int
) -> None:
    choose = random.Random(seed)
    step, rank = choose.randrange(1, 12), choose.randrange(4)
    plan = Strategy(data=2, tensor=2, zero=2)
    one = trainer(plan, epochs=3, every=4, dies_at=[step, rank])
    result = one.fit(WAIT_S)
    assert not result.error
    assert (result.steps, result.restarts) == (12, 1), (step, rank)
    assert "has died" in one.progress()["why"]
    as_one_process(tmp_path / "notes", 12)
    made = [note["step"] for note in loops.notes(tmp_path / "notes") if note["rank"] == rank]
    assert len(made) - 12 <= 4, (step, rank, made)


def test_another_plan_goes_on_from_the_same_checkpoints(trainer: Make, tmp_path: Path) -> None:
    assert trainer(Strategy(data=2, zero=2), epochs=1).fit(WAIT_S).steps == 4
    plan = Strategy(pipeline=2, micro_batches=4)
    result = trainer(plan, epochs=2, resume=True).fit(WAIT_S)
    assert not result.error
    assert result.steps == 8
    assert len(result.value) == 4, "the first epoch is not made again"
    as_one_process(tmp_path / "notes", 8)


def test_a_loop_that_raises_ends_the_training_with_its_error(trainer: Make) -> None:
    result = trainer(Strategy(data=2), raise_at=5).fit(WAIT_S)
    assert result.error_kind == "loop"
    first, *trace = result.error.splitlines()
    assert first.startswith("rank 1 (data 1, tensor 0, stage 0) on n_")
    assert "ZeroDivisionError: the loop's own" in first
    assert any("in noted" in line for line in trace)
    assert result.restarts == 0


def test_a_rank_that_does_not_come_ends_the_training_by_the_deadline(trainer: Make) -> None:
    failure = Failure(retries=0, collective_timeout_s=30.0, hang_s=60.0)
    result = trainer(Strategy(data=2), hang_at=2, failure=failure).fit(WAIT_S)
    assert result.error_kind == "lost"
    assert result.error.startswith("rank 1 (data 1, tensor 0, stage 0) on n_")
    assert "waited in vain for the others, in step 2, forward_backward" in result.error


def test_more_ranks_than_there_is_room_for_are_an_explained_wait(
    trainer: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    one = trainer(Strategy(data=4), resources={"CPU": 2})
    one.submit()
    until(lambda: one.progress().get("waits_for"), WAIT_S, "the controller says why it waits")
    with pytest.raises(GetTimeoutError, match="it is PLACING"):
        one.result(15.0)
    told = capfd.readouterr().err
    assert "for its ranks:" in told and f"stoker explain {one.job_id}" in told, told
    one.stop()
    result = one.result(WAIT_S)
    assert not result.error
    assert result.steps == 0


def test_auto_asks_the_planner(trainer: Make) -> None:
    needs = {"model": loops.make_model(), "seq_len": 1}
    with pytest.raises(BadRequestError, match=r'^plan="auto" finds no plan') as caught:
        trainer("auto", auto=needs).submit()
    assert "no GPU of a known kind" in str(caught.value)
    shape = ClusterShape(nodes=1, gpus_per_node=2, memory_bytes=80e9, flops_per_s=1e15)
    one = trainer("auto", epochs=1, auto={**needs, "cluster": shape})
    result = one.fit(WAIT_S)
    assert not result.error
    assert one.plan is not None and one.progress()["plan"] == str(one.plan.strategy)
    assert (result.steps, len(one.progress()["ranks"])) == (4, 2)
