"""The order of an epoch, shares of a step, and passes over a share, against what they promise."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stoker.exceptions import BadRequestError
from stoker_train.elastic.core.sampler import epoch_order, micro_batches, shares


def test_the_order_is_a_permutation_and_a_function_of_seed_and_epoch_alone(seed: int) -> None:
    orders = {}
    for epoch in range(4):
        order = epoch_order(1000, seed, epoch, True)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(1000))
        assert np.array_equal(order, epoch_order(1000, seed, epoch, True))
        orders[tuple(order.tolist())] = epoch
    assert len(orders) == 4
    assert not np.array_equal(
        epoch_order(1000, seed, 0, True), epoch_order(1000, seed + 1, 0, True)
    )
    assert epoch_order(5, seed, 3, False).tolist() == [0, 1, 2, 3, 4]
    assert epoch_order(0, seed, 0, True).tolist() == []


def test_the_order_is_the_same_for_ever() -> None:
    """A job that goes on from a checkpoint, in another year, must find the order that it began with."""
    assert epoch_order(10, 7, 3, True).tolist() == [2, 4, 7, 3, 5, 1, 8, 9, 0, 6]


@pytest.mark.parametrize("field", ["length", "seed", "epoch"])
def test_a_negative_number_is_refused_by_its_name(field: str) -> None:
    given = {"length": 1, "seed": 1, "epoch": 1, field: -1}
    with pytest.raises(BadRequestError) as caught:
        epoch_order(given["length"], given["seed"], given["epoch"], True)
    assert caught.value.field == field


def test_shares_are_in_order_whole_and_in_proportion(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        ranks, count = draw.randint(1, 9), draw.randint(0, 500)
        weights = [draw.choice([0, 1, 1, draw.random(), draw.randint(1, 9)]) for _ in range(ranks)]
        if not any(weights):
            weights[draw.randrange(ranks)] = 1
        found = shares(count, weights)
        position = 0
        for (offset, size), weight in zip(found, weights, strict=True):
            assert offset == position
            assert abs(size - count * weight / sum(weights)) < 1 + 1e-9
            position += size
        assert position == count


@pytest.mark.parametrize(
    ("count", "weights", "sizes"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (2, [1, 1, 1, 1], [1, 1, 0, 0]),
        (7, [2, 1], [5, 2]),
        (9, [0, 1, 0], [0, 9, 0]),
        (10, [0.1, 0.1, 0.1], [4, 3, 3]),
        (0, [1, 2], [0, 0]),
    ],
)
def test_shares_by_largest_remainder(count: int, weights: list[float], sizes: list[int]) -> None:
    assert [size for _, size in shares(count, weights)] == sizes


@pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [float("nan")], [float("inf"), 1]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(BadRequestError) as caught:
        shares(4, weights)
    assert caught.value.field == "weights"


def test_passes_are_few_and_even() -> None:
    assert micro_batches(0, 4) == ()
    assert micro_batches(10, 4) == (4, 3, 3)
    assert micro_batches(8, 4) == (4, 4)
    assert micro_batches(3, 8) == (3,)
    for size in range(40):
        for local in range(1, 9):
            sizes = micro_batches(size, local)
            assert sum(sizes) == size
            assert len(sizes) == -(-size // local)
            assert all(0 < one <= local for one in sizes)
            assert max(sizes, default=0) - min(sizes, default=0) <= 1
    with pytest.raises(BadRequestError):
        micro_batches(3, 0)
