"""Rows by key: against a dictionary, moved between shards, and dropped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_train.parameter_server.storage.initializers import Normal
from stoker_train.parameter_server.storage.optimizers import SGD, Adam
from stoker_train.parameter_server.storage.sparse import SparseShard
from stoker_train.parameter_server.storage.spec import TableSpec

SPEC = TableSpec(name="t", width=2, optimizer=SGD(0.5), initializer=Normal(seed=5))
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["pull", "peek", "push", "add", "assign"]),
        st.lists(st.integers(-9, 9), unique=True, max_size=12),
    ),
    max_size=12,
)


@given(OPERATIONS)
@settings(max_examples=60)
def test_it_is_a_dictionary_of_rows(operations: list[tuple[str, list[int]]]) -> None:
    shard = SparseShard(SPEC)
    model: dict[int, Any] = {}
    for number, (name, some) in enumerate(operations, 1):
        keys = np.array(some, np.int64)
        first = SPEC.initializer.rows(keys, 2).astype(np.float32)
        values = np.full((keys.size, 2), number, np.float32) + keys[:, None].astype(np.float32)
        before = [model.get(key, row) for key, row in zip(some, first, strict=True)]
        if name in ("pull", "peek"):
            rows = shard.pull(keys, create=name == "pull")
            assert np.array_equal(rows, np.reshape(before, (-1, 2)))
            after = before
        else:
            getattr(shard, name)(keys, values)
            kept, factor = {"push": (1, -0.5), "add": (1, 1), "assign": (0, 1)}[name]
            after = [kept * old + factor * new for old, new in zip(before, values, strict=True)]
        if name != "peek":
            model |= dict(zip(some, after, strict=True))
    assert len(shard) == len(model)
    assert np.allclose(
        shard.pull(np.array([*model], np.int64)), np.reshape([*model.values()], (-1, 2))
    )


@pytest.mark.parametrize("servers", [1, 2, 5])
def test_rows_that_move_lose_nothing(servers: int, seed: int) -> None:
    spec = TableSpec(name="t", width=3, optimizer=Adam(0.1), initializer=Normal(seed=1))
    keys = np.unique(np.random.default_rng(seed).integers(-(2**62), 2**62, 700))
    gradients = np.random.default_rng(seed).standard_normal((keys.size, 3)).astype(np.float32)
    whole = SparseShard(spec)
    whole.push(keys, gradients)
    parts = []
    for number in range(servers):
        parts.append(SparseShard(spec))
        parts[-1].absorb(whole.export(number, servers))
    assert sum(map(len, parts)) == keys.size
    back = SparseShard(spec)
    for part in reversed(parts):
        back.absorb(part.export())
    for one in (whole, back):  # so the states went along, too
        one.push(keys, gradients)
    assert np.array_equal(whole.pull(keys), back.pull(keys))


def test_shrinking_drops_old_and_small_rows() -> None:
    shard = SparseShard(TableSpec(name="t", width=1))
    keys = np.arange(6)
    shard.assign(keys, np.array([[0.0], [1], [2], [3], [4], [5]], np.float32), now_s=1.0)
    shard.push(keys[3:], np.zeros((3, 1), np.float32), now_s=9.0)
    shard.pull(keys, now_s=20.0)  # reading a row keeps it not
    assert shard.shrink(unused_since_s=5.0, max_norm=None) == 3
    assert shard.keys.tolist() == [3, 4, 5]
    assert shard.shrink(unused_since_s=None, max_norm=4.0) == 2
    assert shard.pull(np.array([5, 3])).tolist() == [[5.0], [0.0]]
