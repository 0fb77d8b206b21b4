"""An elastic trainer on a running cluster: to the end, through resizes, losses and mistakes."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from stoker.exceptions import BadRequestError, SerializationError
from stoker.train import Checkpoint, ElasticTrainer, Failure, Scaling
from tests.e2e.train import elastic_loops as loops
from tests.e2e.train.elastic_jobs import WAIT_S, client, has
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.train.elastic_jobs import Trainers

pytest.importorskip("torch")


@pytest.fixture
def trainer(trainer: Trainers) -> Callable[..., ElasticTrainer]:
    """Make trainers of the linear loop; what else is given is its config."""

    def make(
        loop: Any = loops.linear,
        replicas: tuple[int, int] = (1, 2),
        hang_s: float = 30.0,
        **config: Any,
    ) -> ElasticTrainer:
        return trainer(loop, replicas, config={"epochs": 2, **config}, every=20, hang_s=hang_s)

    return make


def test_a_loop_trains_on_two_replicas_to_its_end(trainer: Callable[..., ElasticTrainer]) -> None:
    result = trainer(replicas=(2, 2), epochs=3).fit(WAIT_S)
    assert not result.error
    assert result.ledger_ok, result.ledger_problems
    assert result.steps == 21, "seven steps in an epoch of 100 samples, the last of four"
    assert result.metrics["world_size"] == 2 and result.metrics["weight"] > 0
    assert result.checkpoint.endswith("checkpoint-0000000021.pt")
    assert result.value == pytest.approx(result.value) and result.generations == 1


def test_options_that_nothing_keeps_are_refused_with_the_field(
    elastic_cluster: None, tmp_path: Path
) -> None:
    def refused(field: str, **options: Any) -> None:
        with pytest.raises(BadRequestError, match=f"^{re.escape(field)} ") as caught:
            ElasticTrainer(loops.linear, **options)
        assert "\n" in str(caught.value), "the second line says what to do"

    on_cpu = {"resources": {"CPU": 1}}
    refused("scaling.min_replicas", scaling=Scaling(min_replicas=3, max_replicas=2, **on_cpu))
    refused("scaling.base_batch", scaling=Scaling(base_batch=64, max_batch=32, **on_cpu))
    refused("scaling.local_batch", scaling=Scaling(base_batch=8, local_batch=(16, 32), **on_cpu))
    refused("scaling.lr", scaling=Scaling(lr="cube", **on_cpu))
    refused("checkpoint.keep", checkpoint=Checkpoint(keep=0))
    refused("failure.hang_s", failure=Failure(hang_s=0.0))
    refused("sync", sync="gossip")
    refused("name", name="no/name")
    (tmp_path / "checkpoint-0000000001.json").touch()
    refused("checkpoint.path", checkpoint=str(tmp_path))
    with pytest.raises(SerializationError, match=r"^config cannot be pickled[.]"):
        ElasticTrainer(loops.linear, config={"stream": (one for one in "ab")})


def test_replicas_come_and_go_at_batch_boundaries_and_no_sample_is_lost(
    trainer: Callable[..., ElasticTrainer], tmp_path: Path
) -> None:
    def processes(count: int) -> None:
        seen = tmp_path / "steps"
        until(
            lambda: len({line.pid for line in loops.lines(seen)}) == count, WAIT_S, "all make steps"
        )

    one = trainer(replicas=(1, 2), epochs=10_000, sample_s=0.004)
    one.submit()
    has(one, 2)
    processes(2)
    one.resize(1)
    has(one, 1)
    again = ElasticTrainer.attach(one.name)  # as another program does
    assert again.job_id == one.job_id
    again.resize(2)
    has(again, 2)
    processes(3)
    again.stop()
    result = again.result(WAIT_S)
    assert not result.error
    assert result.ledger_ok, result.ledger_problems
    seen = loops.lines(tmp_path / "steps")
    assert {line.world for line in seen} == {1, 2}
    assert len({line.pid for line in seen}) == 3, "the survivor stays, in the process that it had"
    assert {cost.kind for cost in result.resizes} == {"memory"} and len(result.resizes) >= 2
    assert sorted({line.step for line in seen}) == list(range(1, result.steps + 1))


def test_survivors_of_a_killed_rank_0_go_on_from_their_last_commit(
    trainer: Callable[..., ElasticTrainer], tmp_path: Path
) -> None:
    one = trainer(replicas=(1, 2), epochs=10_000, sample_s=0.004)
    one.submit()
    has(one, 2)
    steps = tmp_path / "steps"
    until(lambda: {line.rank for line in loops.lines(steps)} == {0, 1}, WAIT_S, "both make steps")
    killed = loops.lines(steps)[-1]
    os.kill(loops.pid_of(steps, 0), signal.SIGKILL)
    until(
        lambda: any(line.generation > killed.generation for line in loops.lines(steps)),
        WAIT_S,
        "a survivor makes a step",
    )
    after = next(line for line in loops.lines(steps) if line.generation > killed.generation)
    assert after.world == 1
    before = max(line.step for line in loops.lines(steps) if line.generation == killed.generation)
    assert before - after.step <= 6, "not more than the steps since the last commit are made again"
    has(one, 2)  # another replica in the place of the one that died
    one.stop()
    result = one.result(WAIT_S)
    assert not result.error
    assert result.ledger_ok, result.ledger_problems


def test_a_rank_that_hangs_is_ended_and_the_others_go_on(
    trainer: Callable[..., ElasticTrainer], tmp_path: Path
) -> None:
    one = trainer(replicas=(1, 2), epochs=10_000, sample_s=0.004, hang_s=5.0)
    one.submit()
    has(one, 2)
    steps = tmp_path / "steps"
    until(lambda: {line.rank for line in loops.lines(steps)} == {0, 1}, WAIT_S, "both make steps")
    generation = loops.lines(steps)[-1].generation
    os.kill(loops.pid_of(steps, 1), signal.SIGSTOP)
    until(
        lambda: loops.lines(steps)[-1].generation > generation, WAIT_S, "the survivor makes a step"
    )
    one.stop()
    assert one.result(WAIT_S).ledger_ok


def test_a_checkpoint_restart_that_is_asked_for_begins_new_replicas_at_the_same_step(
    trainer: Callable[..., ElasticTrainer], tmp_path: Path
) -> None:
    def processes() -> int:
        return len({line.pid for line in loops.lines(tmp_path / "steps")})

    one = trainer(replicas=(1, 1), epochs=10_000, sample_s=0.004)
    one.submit()
    until(lambda: processes() == 1, WAIT_S, "the first replica makes steps")
    one.restart()
    until(lambda: processes() == 2, WAIT_S, "another replica makes steps")
    one.stop()
    result = one.result(WAIT_S)
    assert not result.error
    assert result.ledger_ok, result.ledger_problems
    assert [cost.kind for cost in result.resizes] == ["checkpoint"]
    steps = [line.step for line in loops.lines(tmp_path / "steps")]
    assert steps == sorted(set(steps)), "no step is made twice"
    # The one at whose end it left was not noted: ctx.step() does not return then.
    assert len(set(range(1, steps[-1] + 1)) - set(steps)) <= 1


def test_an_error_of_the_loop_ends_the_job_with_its_rank(
    trainer: Callable[..., ElasticTrainer],
) -> None:
    result = trainer(replicas=(2, 2), raises=(3, 1)).fit(WAIT_S)
    assert result.error_kind == "loop"
    assert result.error.startswith("rank 1 on n_")
    assert "ValueError: the loop of the test has had enough" in result.error


def test_a_rank_whose_loop_returns_early_is_named(trainer: Callable[..., ElasticTrainer]) -> None:
    result = trainer(loops.returns_early, replicas=(2, 2)).fit(WAIT_S)
    assert result.error_kind == "early_return"
    assert result.error.startswith(
        "rank 1 returned from the loop after 2 steps, while others go on"
    )
    assert "elastic_loops.py:" in result.error, "the line at which the other waits"


def test_a_newcomer_that_cannot_start_is_quarantined_and_the_job_goes_on(
    trainer: Callable[..., ElasticTrainer], tmp_path: Path
) -> None:
    one = trainer(replicas=(1, 2), epochs=200, sample_s=0.004)
    one.submit()
    has(one, 2)
    one.resize(1)
    has(one, 1)
    (tmp_path / "steps.broken").touch()
    one.resize(2)
    until(
        lambda: "this node lacks a module" in one.progress().get("message", ""),
        WAIT_S,
        "it is said why the newcomer is in quarantine",
    )
    before = loops.lines(tmp_path / "steps")[-1]
    until(
        lambda: loops.lines(tmp_path / "steps")[-1].step > before.step + 5,
        WAIT_S,
        "the others train on",
    )
    assert loops.lines(tmp_path / "steps")[-1].world == 1
    one.stop()
    assert one.result(WAIT_S).ledger_ok


def test_the_next_attempt_of_a_controller_that_died_goes_on_from_the_newest_checkpoint(
    trainer: Callable[..., ElasticTrainer], tmp_path: Path
) -> None:
    one = trainer(replicas=(1, 1), epochs=10_000, sample_s=0.004)
    one.submit()
    until(lambda: one.progress().get("checkpoint"), WAIT_S, "a checkpoint is written")
    first = {line.pid for line in loops.lines(tmp_path / "steps")}
    os.kill(client().get_job(one.job_id).pid, signal.SIGKILL)
    until(
        lambda: {line.pid for line in loops.lines(tmp_path / "steps")} - first,
        WAIT_S,
        "the replica of the next attempt makes steps",
    )
    one.stop()
    result = one.result(WAIT_S)
    assert not result.error
    assert result.ledger_ok, result.ledger_problems
    assert client().get_job(one.job_id).attempt == 2
