"""Latency and bandwidth between ranks: every pair is measured, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from stoker_train.elastic.sync.links import opponents

if TYPE_CHECKING:
    from tests.unit.train.elastic.rank_processes import RankProcesses


@pytest.mark.parametrize("workers", range(1, 12))
def test_each_two_ranks_meet_once_and_at_one_time(workers: int) -> None:
    rounds = [opponents(rank, workers) for rank in range(workers)]
    for rank in range(workers):
        met = [peer for peer in rounds[rank] if peer is not None]
        assert sorted(met) == [other for other in range(workers) if other != rank]
        for number, peer in enumerate(rounds[rank]):
            assert peer is None or rounds[peer][number] == rank


def test_links_are_measured_between_all(ranks: RankProcesses) -> None:
    results = ranks.run(_measure, 3)
    for latency, bandwidth in results:
        assert latency.shape == bandwidth.shape == (3, 3)
        assert (latency == results[0][0]).all()
        assert (bandwidth == results[0][1]).all()
        assert (latency == latency.T).all()
        for row in range(3):
            for column in range(3):
                assert (latency[row, column] > 0) == (bandwidth[row, column] > 0)
                assert (latency[row, column] > 0) == (row != column)


def _measure(rank: int, world: int) -> tuple[Any, Any]:
    from stoker_train.elastic.sync.links import measure_links

    links = measure_links(nbytes=100_000)
    return links.latency_s, links.bandwidth
