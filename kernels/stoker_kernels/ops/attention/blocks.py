"""Block-sparse attention: lists of the blocks of scores that are computed; no other is loaded.

The lists are those of PyTorch's FlexAttention ``BlockMask``: for each block of rows the blocks of columns,
and the transposed ones, which the gradients of keys and values need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_BLOCK = 16  # rows or columns: the least that matrix units take


def _lists(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map mask (..., N) bool -> its number of true places and those places in front, both int32."""
    # A stable sort keeps them in order, and waits for no device.
    indices = torch.argsort((~mask).to(torch.uint8), dim=-1, stable=True)
    return mask.sum(-1, dtype=torch.int32), indices.to(torch.int32).contiguous()


class BlockMask(NamedTuple):
    """The blocks of block_size[0] rows and block_size[1] columns that attention computes.

    ``kv_num_blocks`` (b, h, R) says how many of ``kv_indices`` (b, h, R, C) hold the blocks of columns
    of each block of rows; ``q_num_blocks`` (b, h, C) and ``q_indices`` (b, h, C, R) the same the other way
    round. All int32; b is 1 or the batch, h 1 or the number of query heads.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    q_num_blocks: torch.Tensor
    q_indices: torch.Tensor
    block_size: tuple[int, int] = (128, 128)

    @classmethod
    def from_dense(cls, mask: torch.Tensor, block_size: tuple[int, int] = (128, 128)) -> BlockMask:
        """Make the lists of mask (b, h, R, C) or (R, C) bool, true where a block is computed."""
        if mask.dtype != torch.bool or mask.ndim not in (2, 4):
            raise ValueError(
                f"BlockMask: mask must be (b, h, R, C) or (R, C) bool, got {tuple(mask.shape)} "
                f"{mask.dtype}"
            )
        if any(size < MIN_BLOCK or size & (size - 1) for size in block_size):
            raise ValueError(
                f"BlockMask: block_size must be two powers of two, {MIN_BLOCK} or more, got {block_size}"
            )
        mask = mask if mask.ndim == 4 else mask[None, None]
        return cls(*_lists(mask), *_lists(mask.mT), block_size)

    @classmethod
    def from_function(
        cls,
        allowed: Callable[
            [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | bool
        ],
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        block_size: tuple[int, int] = (128, 128),
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Make the lists of allowed(batch, head, block of rows, block of columns), which broadcasts bool.

        ``batch`` and ``heads`` are 1 where they make no difference. The arguments are int64 tensors.
        """
        blocks = -(-q_len // block_size[0]), -(-kv_len // block_size[1])
        sizes = (batch, heads, *blocks)
        places = torch.meshgrid(*(torch.arange(n, device=device) for n in sizes), indexing="ij")
        mask = torch.as_tensor(allowed(*places), dtype=torch.bool, device=device)
        return cls.from_dense(mask.expand(sizes), block_size)

    def checked(self, name: str, batch: int, heads: int, q_len: int, kv_len: int) -> BlockMask:
        """Return this. Raises ``ValueError`` where its lists do not fit a call's sizes."""
        rows, columns = (
            -(-n // size) for n, size in zip((q_len, kv_len), self.block_size, strict=True)
        )
        b, h = self.kv_num_blocks.shape[:2]
        if b not in (1, batch) or h not in (1, heads):
            raise ValueError(
                f"{name}: block_mask is for {b} sequences and {h} heads, got {batch} and {heads}"
            )
        expected = ((b, h, rows), (b, h, rows, columns), (b, h, columns), (b, h, columns, rows))
        for field, tensor, shape in zip(self._fields, self[:4], expected, strict=False):
            if tensor.shape != shape or tensor.dtype != torch.int32:
                raise ValueError(
                    f"{name}: block_mask.{field} must be {shape} int32, got {tuple(tensor.shape)} "
                    f"{tensor.dtype}"
                )
        return self


def dense_blocks(num_blocks: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Invert ``BlockMask.from_dense``: lists (..., R), (..., R, C) -> (..., R, C) bool."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    mask = torch.zeros_like(listed)
    return mask.scatter(-1, indices.long(), listed)
