"""Hierarchical local SGD: a node is a replica, and between nodes little travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stoker_train.elastic.sync import Hierarchical, LocalSGD

if TYPE_CHECKING:
    from tests.unit.train.elastic.rank_processes import RankProcesses

NODES = ["a", "b", "a", "b"]


def test_with_a_mean_after_every_step_it_is_all_reduce(ranks: RankProcesses, seed: int) -> None:
    sizes = [3, 9, 4, 8]
    ours = ranks.run(_train, 4, Hierarchical(1).spec(), 5, sizes, seed % 1000, NODES)
    dense = ranks.run(_train, 4, "all_reduce", 5, sizes, seed % 1000, None)
    for one in ours:
        for mine, his in zip(one["history"], dense[0]["history"], strict=True):
            torch.testing.assert_close(mine, his, rtol=1e-11, atol=1e-12)


def test_the_ranks_of_a_node_do_as_one_rank_of_local_sgd(ranks: RankProcesses, seed: int) -> None:
    # Ranks of a node hold samples beside each other here, as its one rank of local SGD does.
    nodes = ["a", "a", "b", "b"]
    ours = ranks.run(_train, 4, Hierarchical(3).spec(), 7, [5, 7, 2, 10], seed % 1000, nodes)
    local = ranks.run(_train, 2, LocalSGD(3).spec(), 7, [12, 12], seed % 1000, None)
    for rank, one in enumerate(ours):
        for mine, his in zip(one["history"], local[rank // 2]["history"], strict=True):
            torch.testing.assert_close(mine, his, rtol=1e-11, atol=1e-12)
        assert torch.equal(one["settled"], ours[0]["settled"])
        assert one["touched"] == [False, False, True, False, False, True, False]


def _train(
    rank: int, world: int, spec: Any, steps: int, sizes: list[int], seed: int, nodes: Any
) -> dict[str, Any]:
    from tests.unit.train.elastic.sync import training

    return training.train(rank, world, spec, steps, sizes, seed, nodes=nodes)


def test_a_node_for_each_rank_is_needed(ranks: RankProcesses) -> None:
    for text in ranks.run(_without_nodes, 2):
        assert text.startswith("nodes has 0 entries")


def _without_nodes(rank: int, world: int) -> str:
    from stoker_train.elastic.sync import Hierarchical
    from stoker_train.elastic.sync.exchange import GradientExchange

    exchange = GradientExchange([torch.nn.Parameter(torch.ones(1))])
    try:
        Hierarchical(2).reset(exchange)
    except ValueError as error:
        return str(error)
    finally:
        exchange.close()
    return ""
