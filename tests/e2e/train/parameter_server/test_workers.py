"""Workers in their modes: against one process, within their bound, and named when they do not come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker_train.parameter_server.errors import ParameterServerError, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

ps = stoker.ps
WORLD, FEATURES, STEPS = 3, 2000, 12


def batch(rank: int, step: int) -> tuple[Any, Any]:
    """Features and labels of a worker's step."""
    rng = np.random.default_rng([rank, step])
    features = (rng.random((64, 8)) ** 3 * FEATURES).astype(np.int64)
    return features, (np.sin(features).sum(1) > 0).astype(np.float64)


def gradients(rows: Any, labels: Any) -> Any:
    error = (1 / (1 + np.exp(-rows.sum(1))) - labels) / labels.size
    return np.repeat(error[:, None], rows.shape[1], 1)


def loss(weights: Any) -> float:
    losses = []
    for rank in range(WORLD):
        for step in range(STEPS):
            features, labels = batch(rank, step)
            logits = weights[features].sum(1)
            losses.append(np.mean(np.logaddexp(0, logits) - labels * logits))
    return float(np.mean(losses))


def train(group: Any, rank: int, options: dict[str, Any], delay_s: float = 0.0) -> int:
    import time

    with group.worker(rank, WORLD, **options) as worker:
        for step in range(STEPS):
            features, labels = batch(rank, step)
            rows = worker.pull("w", features)[..., 0]
            bias = worker.pull("b")
            worker.push("w", features, gradients(rows + bias, labels)[..., None])
            worker.push("b", gradients=np.zeros(1))
            time.sleep(delay_s * rank)
            worker.step()
    return sum(worker.nbytes)


def alone(lr: float) -> float:
    weights = np.zeros(FEATURES)
    for step in range(STEPS):
        total = np.zeros(FEATURES)
        for rank in range(WORLD):
            features, labels = batch(rank, step)
            np.add.at(total, features, gradients(weights[features], labels) / WORLD)
        weights -= lr * total
    return loss(weights)


def trained(group: Any, lr: float, options: dict[str, Any]) -> tuple[float, int]:
    """Train by tasks on an empty table; return the loss, and the bytes of all workers."""
    table = group.sparse("w", 1, optimizer=ps.SGD(lr), initializer=ps.Zeros())
    group.dense("b", 1)
    task = stoker.remote(num_cpus=0)(train)
    refs = [task.remote(group, rank, options) for rank in range(WORLD)]
    nbytes = sum(stoker.get(refs, timeout=90))
    return loss(table.pull(np.arange(FEATURES), create=False)[:, 0]), nbytes


def test_modes_reach_the_loss_of_one_process(start: Callable[..., Any]) -> None:
    expected = alone(1.0)
    assert expected < 0.66
    sync, bytes_of_sync = trained(start(2), 1.0, {"mode": "sync"})
    assert sync == pytest.approx(expected, rel=1e-4)
    each, _ = trained(start(2), 1.0, {"mode": "geo", "k": 1})  # no barrier: nearly the same
    assert each == pytest.approx(expected, rel=0.02)
    geo, bytes_of_geo = trained(start(2), 1.0, {"mode": "geo", "k": STEPS})
    assert geo == pytest.approx(expected, rel=0.03)
    assert bytes_of_geo < bytes_of_sync


def test_no_worker_is_further_ahead_than_the_bound(start: Callable[..., Any]) -> None:
    group = start(2)
    group.sparse("w", 1)
    group.dense("b", 1)
    task = stoker.remote(num_cpus=0)(train)
    options = {"mode": "async", "staleness": 2}
    stoker.get([task.remote(group, rank, options, 0.01) for rank in range(WORLD)], timeout=90)
    histogram = group.statistics()["staleness"]
    assert sum(histogram.values()) == WORLD * STEPS
    assert max(histogram) <= 2
    assert group.statistics()["pushes"] > 0


def test_a_worker_that_does_not_come_is_named_and_may_come_later(
    start: Callable[..., Any],
) -> None:
    group = start(1, timeout_s=1)
    table = group.sparse("w", 1, optimizer=ps.SGD(1.0), initializer=ps.Zeros())
    first = group.worker(0, 2, reduce="sum")
    first.push("w", [1], [[-1.0]])
    with pytest.raises(WorkerTimeoutError, match="rank 1: at a step in sync mode"):
        first.step()
    assert table.pull([1]).tolist() == [[0.0]]
    second = group.worker(1, 2, reduce="sum")
    second.push("w", [1], [[-2.0]])
    second.close()
    first.step()  # the same step again
    assert table.pull([1]).tolist() == [[1.0]]
    first.close()

    ahead = group.worker(0, 2, mode="async", staleness=1)
    ahead.step()
    with pytest.raises(WorkerTimeoutError, match="rank 1: more than 1 steps behind rank 0"):
        ahead.step()


def test_a_worker_in_whose_place_another_has_come_is_refused(start: Callable[..., Any]) -> None:
    group = start(1)
    table = group.sparse("w", 1, optimizer=ps.SGD(1.0), initializer=ps.Zeros())
    old, plain = group.worker(0, 1, mode="async"), np.zeros((1, 1), np.float32)
    plain[:] = -1.0
    old.push("w", [1], plain)
    plain[:] = 7.0  # the worker has a copy
    old.step()
    new = group.worker(0, 1, mode="async")
    for worker in (old, new):
        worker.push("w", [1], [[-1.0]])
    with pytest.raises(ParameterServerError, match=r"(?s)rank0 of the workers.*rank of its own"):
        old.step()
    new.step()
    assert table.pull([1]).tolist() == [[2.0]]
    new.close()


def test_an_embedding_pushes_in_the_backward_pass(start: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    group = start(1)
    table = group.sparse("e", 3, optimizer=ps.SGD(0.5), initializer=ps.Zeros())
    module = ps.Embedding(table)
    keys = torch.tensor([[4, 7], [7, 7]])
    (module(keys) * torch.arange(4.0).reshape(2, 2, 1)).sum().backward()
    assert table.pull([4, 7]).tolist() == [[0.0] * 3, [-3.0] * 3]
    with torch.no_grad():
        assert module(torch.tensor([9])).shape == (1, 3)
    assert group.statistics()["tables"]["e"]["rows"] == 2


def add_without_locks(shared: Any, row: int) -> None:
    for _ in range(200):
        shared.array[row] += 1


def test_tasks_on_a_node_train_one_array_without_locks(ps_cluster: None) -> None:
    shared = ps.shared((3, 16))
    task = stoker.remote(num_cpus=0)(add_without_locks)
    stoker.get([task.remote(shared, row) for row in range(3)], timeout=60)
    assert (shared.array == 200).all()
