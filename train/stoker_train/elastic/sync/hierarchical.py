"""Hierarchical local SGD: sums of gradients within a node in every step, means across nodes rarely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stoker_train.elastic.sync.local_sgd import LocalSGD

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from stoker_train.elastic.sync.exchange import GradientExchange


class Hierarchical(LocalSGD):
    """Hierarchical local SGD (Lin et al., ICLR 2020, section 5): a node is one replica of :class:`LocalSGD`.

    Within a node ``g = sum_k(w_k g_k) / sum_k(w_k)`` over its ranks, in every step; ``every`` steps the
    mean of all replicas, whose network is the slow one: there ``compression`` helps. It needs the
    exchange's ``nodes``. All optimizers of a node do the same, so its momentum is the node's.
    """

    name = "hierarchical"
    source = "Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, section 5"

    def __init__(self, every: int, **options: Any) -> None:
        super().__init__(every, **options)
        self._mates: tuple[int, ...] = ()
        self._group: dist.ProcessGroup | None = None

    def exchanges_gradients(self, step: int) -> bool:
        """Tell that gradients are summed, within the node."""
        return True

    def communicates(self, step: int) -> bool:
        """Tell whether the step ends in a mean of all: within the node ranks are always in touch."""
        return self.since + 1 >= self.interval

    def reset(self, exchange: GradientExchange) -> None:
        """Make the process group of this rank's node. On all ranks, which make those of all nodes."""
        import torch.distributed as dist

        super().reset(exchange)
        nodes = exchange.nodes
        if nodes is None or len(nodes) != exchange.workers:
            raise ValueError(
                f"nodes has {len(nodes or ())} entries: hierarchical needs the node of each of the "
                f"{exchange.workers} ranks"
            )
        self._mates, self._group = (exchange.rank,), None
        for node in sorted(set(nodes)):
            mates = tuple(rank for rank, other in enumerate(nodes) if other == node)
            group = None
            if len(mates) > 1:
                ranks = [_global_rank(exchange.group, rank) for rank in mates]
                group = dist.new_group(ranks)
            if exchange.rank in mates:
                self._mates, self._group = mates, group
        exchange.route(self._group, len(self._mates))

    def before_optimizer(self, exchange: GradientExchange, params: Sequence[torch.Tensor]) -> None:
        """Sum the gradients of the node, and take the mean over its samples."""
        import torch

        self._remember(params)
        share = torch.tensor([exchange.share], dtype=torch.float64, device=params[0].device)
        handle = exchange.start_sum(share, self._group) if len(self._mates) > 1 else None
        try:
            exchange.finish()
        finally:
            if handle is not None:
                handle.wait()
        of_node = exchange.summed_share = float(share)
        mine, exchange.share = exchange.share, of_node
        exchange.keep_local()
        exchange.share = mine


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    import torch.distributed as dist

    return rank if group is None else dist.get_global_rank(group, rank)
