"""The rows of a worker in mode GEO: what it sends, and when it reads again."""

from __future__ import annotations

import numpy as np

from stoker_train.parameter_server.client.replica import DenseReplica, SparseReplica
from stoker_train.parameter_server.server.messages import Part
from stoker_train.parameter_server.storage.optimizers import SGD
from stoker_train.parameter_server.storage.sparse import SparseShard
from stoker_train.parameter_server.storage.spec import TableSpec

SPEC = TableSpec(name="s", width=1, optimizer=SGD(0.5))


def test_workers_that_exchange_each_step_are_one_worker_with_their_mean(seed: int) -> None:
    rng = np.random.default_rng(seed)
    server, alone = SparseShard(SPEC), SparseShard(SPEC)
    replicas = [SparseReplica(SPEC) for _ in range(3)]
    for _ in range(8):
        mean = np.zeros((400, 1))
        for replica in replicas:
            keys = rng.permutation(400)[:300]
            gradients = rng.standard_normal((300, 1)).astype(np.float32)
            replica.push(Part(SPEC, keys, gradients), server.pull)
            mean[keys] += gradients / 3
        alone.push(np.arange(400), mean.astype(np.float32))
        parts = [replica.delta(3) for replica in replicas]
        for part in parts:
            assert part is not None and part.keys is not None
            server.add(part.keys, part.values)
        for replica, part in zip(replicas, parts, strict=True):
            assert part is not None and part.keys is not None
            replica.settle(server.pull(part.keys))
    assert np.allclose(server.pull(np.arange(400)), alone.pull(np.arange(400)), atol=1e-5)
    for replica in replicas:  # all read again what others moved meanwhile
        assert np.array_equal(
            replica.pull(np.arange(400), server.pull), server.pull(np.arange(400))
        )


def test_rows_are_read_once_in_a_round_and_sent_only_if_they_moved() -> None:
    server, replica, read = SparseShard(SPEC), SparseReplica(SPEC), []

    def fetch(keys: np.ndarray) -> np.ndarray:
        read.append(keys.tolist())
        return server.pull(keys)

    replica.pull(np.array([1, 2]), fetch)
    replica.pull(np.array([2, 3]), fetch)
    assert read == [[1, 2], [3]]
    assert replica.delta(2) is None
    replica.push(Part(SPEC, np.array([3]), np.ones((1, 1), np.float32)), fetch)
    part = replica.delta(2)
    assert part is not None and part.keys is not None
    assert part.keys.tolist() == [3] and part.values.tolist() == [[-0.25]]
    replica.settle(np.array([[7.0]], np.float32))
    assert replica.pull(np.array([3]), fetch).tolist() == [[7.0]]
    assert read == [[1, 2], [3]]
    replica.pull(np.array([1]), fetch)
    assert read[-1] == [1]


def test_a_dense_replica_goes_on_from_the_servers() -> None:
    spec = TableSpec(name="d", shape=(2,), optimizer=SGD(1.0))
    replica = DenseReplica(spec)
    assert replica.delta(2) is None
    replica.push(
        Part(spec, np.array([0, 2]), np.array([2, 4], np.float32)), lambda: np.ones(2, np.float32)
    )
    part = replica.delta(2)
    assert part is not None and part.values.tolist() == [-1, -2]
    replica.settle(np.array([5, 6], np.float32))
    assert replica.pull(lambda: np.zeros(2)).tolist() == [5, 6]


def test_what_moves_while_an_answer_is_late_is_part_of_the_next_delta() -> None:
    server, replica = SparseShard(SPEC), SparseReplica(SPEC)

    def push(keys: list[int], gradient: float) -> None:
        values = np.full((len(keys), 1), gradient, np.float32)
        replica.push(Part(SPEC, np.array(keys), values), server.pull)

    push([1, 2], 2.0)
    part = replica.delta(1)
    assert part is not None and part.keys is not None
    push([2, 3], 4.0)
    server.add(part.keys, part.values)
    replica.settle(server.pull(part.keys))
    assert replica.pull(np.array([1, 2, 3]), server.pull).ravel().tolist() == [-1, -3, -2]
    part = replica.delta(1)
    assert part is not None and part.keys is not None
    assert part.keys.tolist() == [2, 3] and part.values.ravel().tolist() == [-2, -2]

    spec = TableSpec(name="d", shape=(1,), optimizer=SGD(1.0))
    dense = DenseReplica(spec)
    one = Part(spec, np.array([0, 1]), np.ones(1, np.float32))
    dense.push(one, lambda: np.zeros(1, np.float32))
    assert dense.delta(1) is not None
    dense.push(one, lambda: np.zeros(1, np.float32))
    dense.settle(np.array([-1], np.float32))
    again = dense.delta(1)
    assert again is not None and again.values.tolist() == [-1]
