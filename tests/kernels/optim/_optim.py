"""Runs of an optimizer on gradients that depend on nothing but the step, for the optimizers' tests."""

from __future__ import annotations

from typing import Any

import torch

SHAPES = [(7, 5), (0,), (2049,), (8, 16)]


def starts(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parameters of several sizes, an empty one among them."""
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def train(
    make: Any,
    start: list[torch.Tensor],
    steps: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[torch.Tensor]:
    """Parameters after ``steps`` steps in ``dtype``; gradients are those of ``start``'s dtype."""
    params = [torch.nn.Parameter(s.to(dtype, copy=True)) for s in start]
    optimizer = make(params, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p, s in zip(params, start, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(s.dtype).to(dtype)
        optimizer.step()
    return [p.detach() for p in params]
