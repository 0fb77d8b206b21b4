"""The costs of collectives: bytes that each rank sends, and seconds on a link (ring algorithms).

Patarasuk and Yuan 2009: a ring of n ranks reduces V bytes in 2 (n - 1) steps of V / n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_train.planning.cluster_shape import Link


def gather_bytes(nbytes: float, ranks: int) -> float:
    """Return what each rank sends to gather (or reduce-scatter) ``nbytes`` in all: V (n - 1) / n."""
    return nbytes * (ranks - 1) / ranks


def gather_s(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-gather, or a reduce-scatter, of ``nbytes`` in all."""
    if ranks == 1:
        return 0.0
    return gather_bytes(nbytes, ranks) / link.bytes_per_s + (ranks - 1) * link.latency_s


def reduce_s(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce: a reduce-scatter, then an all-gather."""
    return 2.0 * gather_s(nbytes, ranks, link)


def exchange_s(nbytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-to-all in which each rank has ``nbytes``, most of them for others."""
    if ranks == 1:
        return 0.0
    return gather_bytes(nbytes, ranks) / link.bytes_per_s + (ranks - 1) * link.latency_s


def send_s(nbytes: float, link: Link) -> float:
    """Return the seconds in which one rank sends to the next."""
    return nbytes / link.bytes_per_s + link.latency_s
