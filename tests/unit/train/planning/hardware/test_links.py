"""Rounds in which pairs of nodes are measured, and what planners make of the links."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from stoker_train.planning.cluster_shape import Link
from stoker_train.planning.hardware.links import (
    Measured,
    inside,
    keys_of,
    read_links,
    rounds,
    slowest,
)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 6, 9])
def test_each_pair_is_in_one_round_and_each_node_once_in_a_round(count: int) -> None:
    nodes = [f"n_{number}" for number in range(count)]
    seen = []
    for pairs in rounds(nodes):
        ends = [node for pair in pairs for node in pair]
        assert len(ends) == len(set(ends)), "a node has one link at a time"
        seen += pairs
    assert sorted(seen) == list(itertools.combinations(nodes, 2))
    assert len(list(rounds(nodes))) <= max(0, count - 1 + count % 2)


def test_the_slowest_link_between_the_chosen_nodes_binds() -> None:
    links = {
        ("a", "b"): Measured(10e9, 5e-6, "nccl", 0.0),
        ("a", "c"): Measured(4e9, 9e-6, "nccl", 0.0),
        ("b", "c"): Measured(8e9, 20e-6, "nccl", 0.0),
        ("a", "d"): Measured(1e9, 1e-3, "nccl", 0.0),
        ("a", "a"): Measured(200e9, 2e-6, "nccl", 0.0),
    }
    assert slowest(links, ["a", "b", "c"]) == Link(4e9, 20e-6)
    assert slowest(links, ["a", "b"]) == Link(10e9, 5e-6)
    assert slowest(links, ["a"]) is None
    assert inside(links, ["a", "b"]) == Link(200e9, 2e-6)
    assert inside(links, ["b"]) is None
    values = {f"links/{one}/{other}": msgspec.json.encode(it) for (one, other), it in links.items()}
    assert set(values) - set(keys_of(["b", "a", "c", "d"])) == set()
    assert read_links(values) == links
