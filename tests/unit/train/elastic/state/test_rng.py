"""Random numbers after a restore are those that would have come."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from stoker_train.elastic.state.rng import RandomState

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    state = RandomState().state_dict()
    yield
    RandomState().load_state_dict(state)


def draw() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.randn(()))


def test_they_go_on_from_where_they_were() -> None:
    random.gauss(0, 1)  # has a second half to keep
    state = RandomState().state_dict()
    expected = [(random.gauss(0, 1), *draw()) for _ in range(3)]
    draw()
    RandomState().load_state_dict(state)
    assert [(random.gauss(0, 1), *draw()) for _ in range(3)] == expected


def test_a_newcomer_has_its_own_and_always_the_same(seed: int) -> None:
    seen = {}
    for generation in range(3):
        for rank in range(3):
            RandomState().seed(seed, generation, rank)
            seen[generation, rank] = draw()
    assert len({one[2] for one in seen.values()}) == 9
    RandomState().seed(seed, 1, 2)
    assert draw() == seen[1, 2]
