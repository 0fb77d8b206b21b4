"""The part of a tensor that a rank has: where it lies in the whole, whatever cut it.

Made of plain tensors and of DTensors (ZeRO, tensor parallelism, both, uneven, interleaved), by a rule of our
own: torch gives one offset for a local tensor, which is not enough for a fused weight that is cut inside.
Called by the state, saving and loading. Nothing is copied or sent.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stoker.exceptions import BadRequestError

__all__ = ("Piece", "Place", "local_of", "piece_of_shard", "pieces_of", "runs_of", "writes")

Runs = list[tuple[int, int]]
"""Places [begin, end) along a dimension, in the order in which a local tensor has them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of the tensor ``key``, which as a whole has ``shape``; ``data`` is a view of what is here."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """The rows of a parameter of the whole model that one here is: from ``first`` on, of ``shape``.

    Nearly always it is that one. Tensor parallelism makes several parameters of a fused weight whose parts
    it cannot cut as one.
    """

    name: str
    first: int
    shape: tuple[int, ...]

    def put(self, key: str, pieces: list[Piece]) -> list[Piece]:
        """Return the blocks of the parameter as blocks of the whole model's, which has ``key``."""
        return [
            Piece(key, self.shape, (one.offsets[0] + self.first, *one.offsets[1:]), one.data)
            if one.offsets
            else replace(one, key=key)
            for one in pieces
        ]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor is here, sharing its memory."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def pieces_of(key: str, tensor: torch.Tensor) -> list[Piece]:
    """Return the blocks of ``tensor`` that are here: none where a DTensor has nothing on this rank.

    BadRequestError for a DTensor whose values are partial sums.
    """
    if not isinstance(tensor, DTensor):
        return [Piece(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())]
    return piece_of_shard(key, local_of(tensor), tensor)


def piece_of_shard(key: str, local: torch.Tensor, like: DTensor) -> list[Piece]:
    """Return the blocks of ``local``, a plain tensor that lies as the local part of ``like``."""
    coordinate = like.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    shape = tuple(like.shape)
    runs = runs_of(shape, like.device_mesh.shape, coordinate, like.placements, key)
    lengths = tuple(sum(end - begin for begin, end in dim) for dim in runs)
    if tuple(local.shape) != lengths:
        raise BadRequestError(
            f"{key} has {list(local.shape)} here, and its placements {like.placements} give {list(lengths)}"
            "\nshard it with torch's fully_shard or parallelize_module, or even",
            field="state",
        )
    found = []
    for block in itertools.product(*(_placed(dim) for dim in runs)):
        data = local
        for dim, (at, begin, end) in enumerate(block):
            data = data.narrow(dim, at, end - begin)
        if data.numel() or not math.prod(shape):
            found.append(Piece(key, shape, tuple(begin for _, begin, _ in block), data))
    return found


def writes(key: str, like: torch.Tensor) -> bool:
    """Return whether this rank is the one that writes its blocks of ``like``, of all that have the same.

    Without a word between them, so that the others need not copy it: the key says who. Of plain tensors
    nobody knows who else has them.
    """
    if not isinstance(like, DTensor) or (coordinate := like.device_mesh.get_coordinate()) is None:
        return True
    number, replicas = 0, 1
    for at, placement in enumerate(like.placements):
        if placement.is_replicate():
            number = number * like.device_mesh.shape[at] + coordinate[at]
            replicas *= like.device_mesh.shape[at]
    return zlib.crc32(key.encode()) % replicas == number


def runs_of(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Any],
    key: str = "a tensor",
) -> list[Runs]:
    """Return for each dimension the places of the whole that a rank has of a tensor of ``shape``.

    As torch cuts: along the mesh's dimensions from left to right, in ceil(n / ranks) at a time. A strided
    shard whose factor is that of later cuts of the same dimension was made after them (ZeRO within tensor
    parallelism); any other is cut within each of its parts (fused weights).
    """
    runs: list[Runs] = [[(0, size)] for size in shape]
    waiting: list[list[tuple[int, int]]] = [[] for _ in shape]
    for at, placement in enumerate(placements):
        if placement.is_partial():
            raise BadRequestError(
                f"{key} is a partial sum ({placement}): it has no value to keep\n"
                "redistribute it first",
                field="state",
            )
        if placement.is_replicate():
            continue
        dim, cut = placement.dim, (mesh_shape[at], coordinate[at])
        factor = getattr(placement, "split_factor", 1)
        later = math.prod(
            mesh_shape[other]
            for other in range(at + 1, len(placements))
            if getattr(placements[other], "dim", None) == dim
        )
        if factor > 1 and factor == later:
            waiting[dim].append(cut)
        elif factor > 1:
            parts = [_chunk(runs[dim], factor, part) for part in range(factor)]
            runs[dim] = [run for part in parts for run in _chunk(part, *cut)]
        else:
            runs[dim] = _chunk(runs[dim], *cut)
    for dim, cuts in enumerate(waiting):
        for cut in reversed(cuts):
            runs[dim] = _chunk(runs[dim], *cut)
    return runs


def _chunk(runs: Runs, chunks: int, number: int) -> Runs:
    """Return part ``number`` of ``chunks`` of the places, as ``torch.chunk`` cuts."""
    length = sum(end - begin for begin, end in runs)
    size = -(-length // chunks)
    first, last = min(length, size * number), min(length, size * (number + 1))
    found = []
    for begin, end in runs:
        low, high = max(begin, begin + first), min(end, begin + last)
        if low < high:
            found.append((low, high))
        first, last = first - (end - begin), last - (end - begin)
    return found or [(0, 0)]


def _placed(runs: Runs) -> list[tuple[int, int, int]]:
    """Return each run with its place in the local tensor, neighbours joined."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for begin, end in runs:
        if found and found[-1][2] == begin:
            found[-1] = (found[-1][0], found[-1][1], end)
        else:
            found.append((at, begin, end))
        at += end - begin
    return found
