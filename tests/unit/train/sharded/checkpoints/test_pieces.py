"""The blocks of a cut tensor: as torch cuts it, for ZeRO within tensor parallelism and fused weights, too."""

from __future__ import annotations

import random

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from stoker_train.sharded.checkpoints.pieces import runs_of


def _taken(shape: tuple[int, ...], runs: list[list[tuple[int, int]]]) -> torch.Tensor:
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    rows, columns = (
        torch.tensor([place for begin, end in dim for place in range(begin, end)], dtype=torch.long)
        for dim in runs
    )
    return whole[rows][:, columns]


def _cut(whole: torch.Tensor, dim: int, ranks: int, rank: int) -> torch.Tensor:
    parts = whole.chunk(ranks, dim)
    return parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)


def test_blocks_are_what_torch_cuts() -> None:
    seed = random.randrange(2**32)
    drawn = random.Random(seed)
    for _ in range(200):
        shape = (drawn.randint(1, 13), drawn.randint(1, 9))
        data, tensor = drawn.randint(1, 4), drawn.randint(1, 4)
        at = (drawn.randrange(data), drawn.randrange(tensor))
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        for dim in (0, 1):
            # ZeRO by rows of what tensor parallelism has cut, by rows as well or by columns.
            expected = _cut(_cut(whole, dim, tensor, at[1]), 0, data, at[0])
            zero = _StridedShard(0, split_factor=tensor) if dim == 0 and tensor > 1 else Shard(0)
            found = runs_of(shape, (data, tensor), at, (zero, Shard(dim)))
            assert torch.equal(_taken(shape, found), expected), (shape, data, tensor, at, dim)
        # A fused weight of three, each cut by the ranks.
        fused = torch.cat([_cut(part, 0, tensor, at[1]) for part in whole.chunk(3)])
        found = runs_of(shape, (data, tensor), at, (Replicate(), _StridedShard(0, split_factor=3)))
        assert torch.equal(_taken(shape, found), fused), (shape, tensor, at)
