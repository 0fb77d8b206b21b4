"""The shipped policies: when they ask, for what, and when no more."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from stoker_train.elastic.policies import (
    Actions,
    BatchFromNoise,
    Budget,
    EarlyGrowth,
    EvenOut,
    Metrics,
    Policy,
    SyncSwitchOnLoss,
)
from stoker_train.elastic.sync import LocalSGD

BASE = Metrics(replicas=2, batch=64, base_batch=64, loss=1.0, step_s=(1.0, 1.1))


def asked(policy: Policy, *metrics: Metrics) -> list[list[tuple[str, Any]]]:
    """What a policy asks for after each of some steps."""
    actions, found = Actions(), []
    for one in metrics:
        policy.after_step(one, actions)
        found.append([(request.kind, request.value) for request in actions.take()])
        for request in actions.requests.values():
            assert request.reason
    return found


def test_the_batch_follows_the_noise_scale() -> None:
    policy = BatchFromNoise(200, every=10)
    steps = [
        replace(BASE, step=9, gns=1000.0),
        replace(BASE, step=10, gns=120.0),
        replace(BASE, step=20, gns=130.0),
        replace(BASE, step=21, gns=1000.0),
        replace(BASE, step=30, gns=1000.0, batch=128),
        replace(BASE, step=40, gns=1000.0, batch=200),
        replace(BASE, step=50, gns=math.nan),
        replace(BASE, step=60, gns=math.inf),
    ]
    expected: list[list[tuple[str, Any]]] = [[] for _ in steps]
    expected[2] = [("set_batch_size", 128)]
    expected[4] = [("set_batch_size", 200)]
    expected[7] = [("set_batch_size", 128)]
    assert asked(policy, *steps) == expected


def grown(worth: float) -> list[list[tuple[str, Any]]]:
    """EarlyGrowth where each doubling gives ``worth`` of a doubled speed."""
    policy, replicas, found = EarlyGrowth(8, every_s=10.0), 1, []
    for second in range(0, 100, 5):
        speed = (1 + worth) ** math.log2(replicas)
        step = replace(BASE, elapsed_s=second, replicas=replicas, step_s=(64 / speed,))
        (requests,) = asked(policy, step)
        if requests:
            found.append(requests)
            replicas = requests[0][1]
    return found


def test_early_growth_goes_on_while_it_pays() -> None:
    assert grown(1.0) == [[("resize", 2)], [("resize", 4)], [("resize", 8)]]
    assert grown(0.6) == [[("resize", 2)], [("resize", 4)], [("resize", 8)]]


def test_a_growth_that_did_not_pay_is_taken_back_and_the_last() -> None:
    assert grown(0.3) == [[("resize", 2)], [("resize", 1)]]


def test_the_strategy_is_switched_once_the_smoothed_loss_is_low() -> None:
    policy = SyncSwitchOnLoss(0.5, LocalSGD(8), smoothing=0.5)
    losses = [1.0, 0.4, 0.4, math.nan, 0.4, 0.1]
    expected: list[list[tuple[str, Any]]] = [[] for _ in losses]
    expected[4] = [("set_sync", LocalSGD(8).spec())]
    assert asked(policy, *(replace(BASE, loss=loss) for loss in losses)) == expected


def test_a_budget_ends_training_before_it_is_overdrawn() -> None:
    policy = Budget(1.0, shrink_at=0.5)
    hours = [0.4, 0.5, 0.6, 0.9993, 0.9995]
    steps = [replace(BASE, gpu_hours=hour) for hour in hours]
    assert asked(policy, *steps) == [[], [("resize", 1)], [], [], [("stop", None)]]


def test_a_slow_rank_gets_less_and_a_slow_node_another_strategy() -> None:
    shares = (0.4, 0.2, 0.4)
    slow = replace(BASE, replicas=3, slow_ranks=(1,), suggested_shares=shares)
    assert asked(EvenOut(), BASE, slow, slow) == [[], [("set_shares", shares)], []]
    node = replace(slow, slow_ranks=(), slow_nodes=("b",))
    assert asked(EvenOut(LocalSGD(4)), node, node) == [[("set_sync", LocalSGD(4).spec())], []]
    assert asked(EvenOut(), node) == [[("set_shares", shares)]]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: BatchFromNoise(100, ratio=0), "ratio is 0"),
        (lambda: BatchFromNoise(100, factor=1), "factor is 1"),
        (lambda: BatchFromNoise(100, every=0), "every is 0"),
        (lambda: EarlyGrowth(0), "max_replicas is 0"),
        (lambda: EarlyGrowth(2, least=0), "least is 0"),
        (lambda: SyncSwitchOnLoss(1.0, "all_reduce", smoothing=1.0), "smoothing is 1.0"),
        (lambda: Budget(0), "gpu_hours is 0"),
        (lambda: Budget(1, shrink_at=1), "shrink_at is 1"),
    ],
)
def test_wrong_options_are_named(make: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()
