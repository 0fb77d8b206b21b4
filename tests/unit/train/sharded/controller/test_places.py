"""The bundles of a gang, and which rank gets which: tensor groups stay on a node."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from stoker.train import Strategy
from stoker_train.sharded.controller.places import bundles_of, in_order

GPU = {"GPU": 1.0, "CPU": 2.0}


@pytest.mark.parametrize(
    ("tensor", "gpus", "count", "ranks"),
    [(1, 8, 8, 1), (2, 8, 4, 2), (8, 8, 1, 8), (8, 4, 8, 1)],
)
def test_a_tensor_group_is_one_bundle_where_a_node_has_room(
    tensor: int, gpus: int, count: int, ranks: int
) -> None:
    strategy = Strategy(data=8 // tensor, tensor=tensor)
    nodes = [{"GPU": 1.0, "CPU": 8.0}, {"GPU": float(gpus), "CPU": 64.0}]
    found = bundles_of(strategy, GPU, nodes)
    assert (found.count, found.ranks) == (count, ranks)
    assert found.resources == {"GPU": float(ranks), "CPU": 2.0 * ranks}


def test_room_is_of_all_resources() -> None:
    nodes = [{"GPU": 8.0, "CPU": 3.0}]
    assert bundles_of(Strategy(tensor=2), GPU, nodes).ranks == 1, "3 CPUs are not 2 x 2"


def test_ranks_fill_one_node_after_the_other(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(200):
        nodes = [choose.choice("abc") for _ in range(choose.randrange(1, 20))]
        order = in_order(nodes)
        assert sorted(order) == list(range(len(nodes)))
        placed = [nodes[one] for one in order]
        changes = sum(left != right for left, right in pairwise(placed))
        assert changes == len(set(nodes)) - 1, placed
        counts = [placed.count(node) for node in dict.fromkeys(placed)]
        assert counts == sorted(counts, reverse=True)
