"""First values of rows: by seed and key alone."""

from __future__ import annotations

import numpy as np
import pytest

from stoker_train.parameter_server.storage.initializers import Initializer, Normal, Uniform, Zeros


@pytest.mark.parametrize("initializer", [Uniform(seed=3), Normal(seed=3)])
def test_a_row_depends_on_its_seed_and_key_alone(initializer: Initializer, seed: int) -> None:
    keys = np.random.default_rng(seed).integers(-(2**62), 2**62, 200)
    whole = initializer.rows(keys, 5)
    order = np.random.default_rng(seed).permutation(keys.size)
    assert (initializer.rows(keys[order], 5) == whole[order]).all()
    assert (initializer.rows(keys[7:8], 5) == whole[7:8]).all()
    assert len(np.unique(whole)) == whole.size
    assert (type(initializer)(seed=4).rows(keys, 5) != whole).all()


def test_values_are_distributed_as_they_say() -> None:
    keys = np.arange(20_000)
    uniform = Uniform(-1.0, 3.0, seed=1).rows(keys, 8)
    assert uniform.min() >= -1 and uniform.max() <= 3
    assert abs(uniform.mean() - 1) < 0.02 and abs(uniform.var() - 16 / 12) < 0.03
    normal = Normal(2.0, 0.5, seed=1).rows(keys, 8)
    assert abs(normal.mean() - 2) < 0.01 and abs(normal.std() - 0.5) < 0.01
    between = np.corrcoef(normal.T)[np.triu_indices(8, 1)]
    assert np.abs(between).max() < 0.05
    assert not Zeros().rows(keys, 2).any()
