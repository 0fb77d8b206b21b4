"""Latency and bandwidth between each two ranks, measured on a process group.

Replicas measure on request, between two steps; a policy reads it as metrics. All ranks call it at one step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from stoker_goodput.throughput import Floats

SMALL_NBYTES = 8
_TAG = 7001


@dataclass(frozen=True, slots=True)
class Links:
    """From each rank (row) to each (column): seconds for a tiny message, and bytes per second of a large one.

    The diagonal is 0. Half the time there and back, so rows and columns are alike.
    """

    latency_s: Floats
    bandwidth: Floats


def measure_links(
    group: dist.ProcessGroup | None = None,
    *,
    nbytes: int = 1 << 20,
    repeats: int = 3,
    device: torch.device | str = "cpu",
) -> Links:
    """Measure every pair once, pairs of different ranks at the same time (a round-robin tournament).

    The least of ``repeats`` counts. It takes K - 1 rounds for K ranks; every rank returns the same.
    """
    rank, workers = dist.get_rank(group), dist.get_world_size(group)
    times = torch.zeros(2, workers, workers, dtype=torch.float64)
    small = torch.zeros(SMALL_NBYTES, dtype=torch.uint8, device=device)
    large = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    for peer in opponents(rank, workers):
        if peer is None:
            continue
        for row, buffer in enumerate((small, large)):
            _ping(buffer, rank, peer, group)  # connects
            seconds = min(_ping(buffer, rank, peer, group) for _ in range(repeats))
            if rank < peer:
                times[row, rank, peer] = times[row, peer, rank] = seconds / 2
    times = times.to(device)
    dist.all_reduce(times, group=group)
    latency, whole = times.cpu().numpy()
    sending = whole - latency
    bandwidth = (nbytes - SMALL_NBYTES) / sending.clip(min=1e-9)
    bandwidth[whole == 0] = 0.0
    return Links(latency, bandwidth)


def opponents(rank: int, workers: int) -> tuple[int | None, ...]:
    """Return the rank that ``rank`` meets in each round, None for a pause: all pairs, each once."""
    seats = workers + workers % 2
    rounds: list[int | None] = []
    for number in range(seats - 1):
        if rank == seats - 1:
            peer = next(other for other in range(seats - 1) if (2 * other) % (seats - 1) == number)
        else:
            peer = (number - rank) % (seats - 1)
            peer = seats - 1 if peer == rank else peer
        rounds.append(peer if peer < workers else None)
    return tuple(rounds)


def _ping(buffer: torch.Tensor, rank: int, peer: int, group: dist.ProcessGroup | None) -> float:
    """Send ``buffer`` to a peer and back; returns the seconds, which count on the lower rank."""
    other = peer if group is None else dist.get_global_rank(group, peer)
    began = time.perf_counter()
    if rank < peer:
        dist.send(buffer, other, group=group, tag=_TAG)
        dist.recv(buffer, other, group=group, tag=_TAG)
    else:
        dist.recv(buffer, other, group=group, tag=_TAG)
        dist.send(buffer, other, group=group, tag=_TAG)
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return time.perf_counter() - began
