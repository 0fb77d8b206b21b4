"""Prefix sums and stable sorting in PyTorch: the specification, and the CPU implementation.

    y_i = x_0 + ... + x_i;  reversed: y_i = x_i + ... + x_(n-1)
    values_i = x[indices_i], rising (or falling); equal ones in the order they had

Sums are in fp32 at least and rounded once; of integers in int64. NaN sorts above all numbers, and 0.0 equals
-0.0, as in ``torch.sort``.
"""

from __future__ import annotations

import torch

from stoker_kernels.runtime.backend import compute_dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the sums of values of ``dtype``: as torch, its own, or int64 for integers."""
    return dtype if dtype.is_floating_point else torch.int64


def prefix_sum(x: torch.Tensor, reverse: bool) -> torch.Tensor:
    """Map x (rows, n) -> its sums along each row, of ``sum_dtype``."""
    out = sum_dtype(x.dtype)
    wide = x.to(compute_dtype(x.dtype) if x.is_floating_point() else out)
    wide = wide.flip(1).cumsum(1).flip(1) if reverse else wide.cumsum(1)
    return wide.to(out)


def sort_indices(x: torch.Tensor, descending: bool) -> torch.Tensor:
    """Map x (rows, n) -> where the values of each sorted row come from (rows, n) int64."""
    return torch.sort(x, dim=1, descending=descending, stable=True).indices
