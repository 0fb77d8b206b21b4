"""Allocations of elastic jobs: their replicas by node."""

from __future__ import annotations

Allocation = tuple[tuple[str, int], ...]
"""The replicas of a job by node, in the order of its ring; a replica has one GPU."""


def replicas_of(allocation: Allocation) -> int:
    """Return how many replicas an allocation has in all."""
    return sum(count for _, count in allocation)
