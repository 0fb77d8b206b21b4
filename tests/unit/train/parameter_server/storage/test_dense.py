"""Blocks of a dense table: the same as one array, whatever the blocks."""

from __future__ import annotations

import numpy as np
import pytest

from stoker_train.parameter_server.storage.dense import DenseShard
from stoker_train.parameter_server.storage.initializers import Uniform
from stoker_train.parameter_server.storage.keys import dense_bounds
from stoker_train.parameter_server.storage.optimizers import SGD, Adagrad, Adam, Optimizer
from stoker_train.parameter_server.storage.spec import TableSpec


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.5), Adagrad(0.1), Adam(0.1)])
def test_blocks_are_stepped_and_moved_as_one_array(optimizer: Optimizer, seed: int) -> None:
    spec = TableSpec(name="t", shape=(11,), optimizer=optimizer, initializer=Uniform(seed=2))
    rng = np.random.default_rng(seed)
    whole = DenseShard(spec, 0, 11)
    blocks = [DenseShard(spec, *bounds) for bounds in dense_bounds(11, 2)]
    for servers in (3, 1, 4, 20):
        gradient = rng.standard_normal(11).astype(np.float32)
        whole.push(0, gradient)
        for block in blocks:
            middle = (block.start + block.end) // 2  # a push that was split anew
            for low, high in ((block.start, middle), (middle, block.end)):
                block.push(low, gradient[low:high])
        assert np.array_equal(np.concatenate([one.pull() for one in blocks]), whole.pull())
        moved = [DenseShard(spec, *bounds) for bounds in dense_bounds(11, servers)]
        for new in moved:
            for block in blocks:
                new.absorb(block.export())
        blocks = moved
    whole.add(0, np.ones(11, np.float32))
    for block in blocks:
        block.add(block.start, np.ones(len(block), np.float32))
    assert np.array_equal(np.concatenate([one.pull() for one in blocks]), whole.pull())
