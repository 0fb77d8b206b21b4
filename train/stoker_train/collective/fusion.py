"""Tensor fusion: many small tensors in few large exchanges, as Horovod's fusion buffer.

A tensor's exchange costs a fixed time besides that by its size; those of one dtype and device are laid
end to end in a buffer of at most ``fusion_nbytes``. Used by grouped operations, broadcasts of parameters and
:class:`~stoker_train.collective.training.optimizer.DistributedOptimizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FUSION_NBYTES = 64 * 2**20


def buckets(
    sizes: Sequence[tuple[object, int]], fusion_nbytes: int = FUSION_NBYTES
) -> list[list[int]]:
    """Return the places of tensors by bucket, in order; ``sizes`` has each one's kind and bytes.

    A bucket is of one kind and has at most ``fusion_nbytes``, or one tensor. All members get the same.
    """
    found: list[list[int]] = []
    open_: dict[object, tuple[list[int], int]] = {}
    for place, (kind, nbytes) in enumerate(sizes):
        bucket, held = open_.get(kind, ([], 0))
        if not bucket or held + nbytes > fusion_nbytes:
            bucket, held = [], 0
            found.append(bucket)
        bucket.append(place)
        open_[kind] = bucket, held + nbytes
    return found


def fused(
    tensors: Sequence[torch.Tensor],
    exchange: Callable[[torch.Tensor], None],
    fusion_nbytes: int = FUSION_NBYTES,
) -> None:
    """Run ``exchange``, which works in place, over all ``tensors`` in few buffers."""
    import torch

    sizes = [((one.dtype, one.device), one.nbytes) for one in tensors]
    for bucket in buckets(sizes, fusion_nbytes):
        parts = [tensors[place] for place in bucket]
        if len(parts) == 1 and parts[0].is_contiguous():
            exchange(parts[0])
            continue
        buffer = torch.cat([part.reshape(-1) for part in parts])
        exchange(buffer)
        pieces = torch.split(buffer, [part.numel() for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            part.copy_(piece.view(part.shape))
