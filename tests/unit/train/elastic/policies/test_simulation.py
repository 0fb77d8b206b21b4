"""Policies on a computed job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_train.elastic.policies import (
    Actions,
    BatchFromNoise,
    Budget,
    EarlyGrowth,
    Metrics,
    Policy,
    SyncSwitchOnLoss,
    simulate,
)

if TYPE_CHECKING:
    from stoker_train.elastic.policies import Simulated

PARAMS = ThroughputParams(0.05, 0.002, 0.08, 0.004, 0.03, 0.002, 1.6)


def run(policy: Policy, **options: object) -> tuple[Simulated, ...]:
    """A job whose noise grows with its progress."""
    return simulate(
        policy,
        params=PARAMS,
        noise=lambda progress: GradientNoise(1.0, 1.0 + 40.0 * progress),
        base_batch=64,
        work=500,
        **options,  # type: ignore[arg-type]
    )


def test_a_job_without_a_policy_does_its_work() -> None:
    steps = run(Policy())
    assert len(steps) == 500
    last = steps[-1].metrics
    assert last.elapsed_s == pytest.approx(500 * float(PARAMS.step_time(1, 1, 64)))
    assert last.gpu_hours == pytest.approx(last.elapsed_s / 3600)
    assert last.epoch == 5


def test_a_batch_that_follows_the_noise_ends_in_fewer_steps() -> None:
    steps = run(BatchFromNoise(4096, every=20), replicas=8)
    assert len(steps) < 300
    batches = [one.metrics.batch for one in steps]
    assert batches == sorted(batches)
    assert batches[-1] >= 512
    assert steps[-1].metrics.elapsed_s < run(Policy(), replicas=8)[-1].metrics.elapsed_s


def test_requests_are_met_at_the_next_step() -> None:
    class Once(Policy):
        def before_step(self, metrics: Metrics, actions: Actions) -> None:
            if metrics.step == 3:
                actions.resize(100)
                actions.set_lr(0.5)

    steps = run(Once(), max_replicas=16)
    assert [one.metrics.replicas for one in steps[:6]] == [1, 1, 1, 1, 16, 16]
    assert [one.metrics.nodes for one in steps[3:5]] == [1, 2]
    assert steps[4].metrics.lr == 0.5


def test_shipped_policies_run_through() -> None:
    assert run(Budget(0.01))[-1].metrics.gpu_hours <= 0.0101
    grown = [one.metrics.replicas for one in run(EarlyGrowth(8, every_s=5.0))]
    assert set(grown) == {1, 2}, "a second replica gives less than half of what it costs here"
    assert grown[-1] == 1
    assert run(SyncSwitchOnLoss(0.5, "all_reduce"))[-1].metrics.sync == "all_reduce"
    assert len(run(Policy(), most_steps=7)) == 7


def test_every_hook_is_called() -> None:
    calls: list[str] = []

    class Noted(Policy):
        def before_train(self, metrics: Metrics, actions: Actions) -> None:
            calls.append("before_train")

        def before_epoch(self, metrics: Metrics, actions: Actions) -> None:
            calls.append("before_epoch")

        def after_epoch(self, metrics: Metrics, actions: Actions) -> None:
            calls.append("after_epoch")

        def after_train(self, metrics: Metrics, actions: Actions) -> None:
            calls.append("after_train")

    run(Noted(), steps_per_epoch=250)
    epochs = ["before_epoch", "after_epoch"] * 2
    assert calls == ["before_train", *epochs, "after_train"]
