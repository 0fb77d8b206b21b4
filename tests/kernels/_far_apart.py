"""Tensors whose elements lie further apart than 2^31, on a machine without the memory for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path


def far_apart(values: torch.Tensor, dim: int, folder: Path) -> torch.Tensor:
    """``values`` in a sparse file, with a stride of 2^30 elements along ``dim`` of three entries.

    The last entry is 2^31 elements from the first: int32 arithmetic wraps to the far side, where the
    file holds zeros, so a kernel without int64 offsets gives wrong numbers and does not crash.
    """
    assert values.shape[dim] == 3
    strides = list(values.contiguous().stride())
    strides[dim] = 2**30
    before = 2**31
    extent = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)) + 1
    path = str(folder / "sparse")
    storage = torch.from_file(path, shared=True, size=before + extent, dtype=values.dtype)
    view = storage.as_strided(values.shape, strides, before)
    return view.copy_(values)
