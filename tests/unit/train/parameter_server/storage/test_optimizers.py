"""The optimizers of tables beside PyTorch's formulas, computed row by row in float64."""

from __future__ import annotations

import numpy as np
import pytest

from stoker_train.parameter_server.storage.optimizers import SGD, Adagrad, Adam, Optimizer
from stoker_train.parameter_server.storage.sparse import SparseShard
from stoker_train.parameter_server.storage.spec import TableSpec


def stepped(optimizer: Optimizer, row: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """Return a row after its gradients, by the formulas as they are written in papers."""
    first, second = np.zeros_like(row), np.zeros_like(row)
    for number, g in enumerate(gradients, 1):
        match optimizer:
            case SGD(lr=lr, momentum=momentum):
                first = momentum * first + g
                row = row - lr * first
            case Adagrad(lr=lr, eps=eps):
                second = second + g**2
                row = row - lr * g / (np.sqrt(second) + eps)
            case Adam(lr=lr, beta1=beta1, beta2=beta2, eps=eps):
                first = beta1 * first + (1 - beta1) * g
                second = beta2 * second + (1 - beta2) * g**2
                hats = first / (1 - beta1**number), second / (1 - beta2**number)
                row = row - lr * hats[0] / (np.sqrt(hats[1]) + eps)
    return row


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9), Adagrad(0.1), Adam(0.1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float64", 1e-12)])
def test_rows_are_stepped_by_the_formula(
    optimizer: Optimizer, dtype: str, tolerance: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    width = 3
    shard = SparseShard(TableSpec(name="t", width=width, dtype=dtype, optimizer=optimizer))
    given: dict[int, list[np.ndarray]] = {}
    for _ in range(12):
        keys = rng.permutation(20)[: rng.integers(1, 20)]
        gradients = rng.standard_normal((keys.size, width)).astype(dtype)
        shard.push(keys, gradients)
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            given.setdefault(key, []).append(gradient.astype(np.float64))
    rows = shard.pull(np.array(list(given)))
    expected = [stepped(optimizer, np.zeros(width), some) for some in given.values()]
    assert np.allclose(rows, expected, rtol=tolerance, atol=tolerance)


def test_more_rows_than_a_block_are_all_stepped(seed: int) -> None:
    keys = np.random.default_rng(seed).permutation(3000)
    shard = SparseShard(TableSpec(name="t", width=64, optimizer=SGD(1.0)))
    shard.push(keys, np.repeat(keys[:, None], 64, 1).astype(np.float32))
    assert (shard.pull(np.arange(3000)) == -np.arange(3000)[:, None]).all()
