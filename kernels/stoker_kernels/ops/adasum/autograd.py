"""Adasum's torch side: the opaque op of a pair with its fake, and the public function over workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker_kernels.ops.adasum import reference
from stoker_kernels.runtime.backend import Backend, backend_for, register_op


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if backend_for(a) is Backend.TRITON:
        from stoker_kernels.ops.adasum import triton

        return triton.pair(a.contiguous(), b.contiguous())
    return reference.pair(a, b)


def _pair_fake(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape)


_PAIR = register_op("adasum_pair", "(Tensor a, Tensor b) -> Tensor", _pair, _pair_fake)


@torch.no_grad()
def adasum(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine one layer's gradients of W workers, equal in shape and dtype, into a new tensor.

    Pairs are combined up a tree; of an odd number the last goes up as it is, so W is any number.
    The tree and its order are the same everywhere, so every worker that has all W gets the same bits.
    Raises ``ValueError`` for none, or for gradients that differ in shape or dtype.
    """
    if not gradients:
        raise ValueError("adasum: gradients must hold at least one tensor")
    first = gradients[0]
    for other in gradients[1:]:
        if other.shape != first.shape or other.dtype != first.dtype:
            raise ValueError(
                f"adasum: gradients must be alike, got {tuple(first.shape)} {first.dtype} and "
                f"{tuple(other.shape)} {other.dtype}"
            )
    level = [gradient.reshape(-1) for gradient in gradients]
    while len(level) > 1:
        upper = [_PAIR(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = upper + level[2 * len(upper) :]
    out = level[0].clone() if len(gradients) == 1 else level[0]
    return out.view(first.shape)
