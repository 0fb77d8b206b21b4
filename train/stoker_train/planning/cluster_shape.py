"""The shape of a cluster as a planner sees it: nodes of equal GPUs, and the links in and between them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A link: bytes a second in one direction, and the seconds that a message takes at least."""

    bytes_per_s: float
    latency_s: float = 10e-6

    def __post_init__(self) -> None:
        for field, least in (("bytes_per_s", 1.0), ("latency_s", 0.0)):
            value = getattr(self, field)
            if not math.isfinite(value) or value < least:
                raise ValueError(f"Link: {field} must be at least {least:g}, got {value}")


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """``nodes`` machines of ``gpus_per_node`` equal GPUs.

    ``memory_bytes`` is of one GPU, ``flops_per_s`` what its products reach (not the data sheet's).
    ``inside`` is the link of one GPU to its neighbours, ``between`` that of a whole node to the others.
    ``host_bytes`` is the memory of a node for what is offloaded, over ``host``, the link of one GPU to it.
    """

    nodes: int
    gpus_per_node: int
    memory_bytes: float
    flops_per_s: float
    inside: Link = Link(200e9, 5e-6)
    between: Link = Link(25e9, 20e-6)
    host: Link = Link(20e9, 20e-6)
    host_bytes: float = 0.0
    memory_bytes_per_s: float = 2e12
    host_update_bytes_per_s: float = 20e9
    """Optimizer state that a node's CPUs update in a second."""
    reserved_bytes: float = 1.5e9
    """What CUDA's context, libraries and fragmentation take of each GPU."""
    overlap: float = 1.0
    """The part of a computation beside which exchange costs nothing: 0 where both need the same cores."""
    reduce_scatter_cost: float = 1.0
    """The time of a reduce-scatter over that of an all-gather of as many bytes, as it was measured."""
    all_reduce_cost: float = 1.0
    """The time of an all-reduce over that of two all-gathers, as it was measured."""

    def __post_init__(self) -> None:
        for field in ("nodes", "gpus_per_node"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"ClusterShape: {field} must be a whole number from 1, got {value!r}"
                )
        for field in (
            "memory_bytes",
            "flops_per_s",
            "memory_bytes_per_s",
            "reduce_scatter_cost",
            "all_reduce_cost",
        ):
            value = getattr(self, field)
            if not math.isfinite(value) or value <= 0:
                raise ValueError(f"ClusterShape: {field} must be above 0, got {value}")
        if not 0.0 <= self.overlap <= 1.0:
            raise ValueError(f"ClusterShape: overlap must lie in [0, 1], got {self.overlap}")
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise ValueError(
                f"ClusterShape: reserved_bytes must lie in [0, memory_bytes), got {self.reserved_bytes}"
            )

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU that a training job may fill."""
        return self.memory_bytes - self.reserved_bytes

    def link_of(self, size: int, stride: int) -> Link:
        """Return the link by which a ring of ``size`` ranks, ``stride`` apart, is bound.

        Ranks fill one node after the other. Rings that all lie in nodes have the GPUs' own links. One over
        nodes shares the node's link with as many rings as the node has members of it fewer than GPUs.
        """
        per_node = self.gpus_per_node
        if size * stride <= per_node and per_node % (size * stride) == 0:
            return self.inside
        members = max(1, per_node // stride)
        rings = max(1, per_node // members)
        return Link(self.between.bytes_per_s / rings, self.between.latency_s)
