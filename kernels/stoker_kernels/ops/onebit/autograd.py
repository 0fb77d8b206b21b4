"""1-bit compression's torch side: opaque ops with fakes and the public functions."""

from __future__ import annotations

import torch

from stoker_kernels.ops.onebit import reference
from stoker_kernels.ops.onebit.reference import BLOCK, WORD
from stoker_kernels.runtime.backend import Backend, backend_for, compute_dtype, register_op

__all__ = ("BLOCK", "onebit_compress", "onebit_decompress")


def _compress(gradient: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if backend_for(gradient) is Backend.TRITON:
        from stoker_kernels.ops.onebit import triton

        return triton.compress(gradient.contiguous(), error)
    return reference.compress(gradient, error)


def _compress_fake(
    gradient: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    n = gradient.numel()
    words = error.new_empty(-(-n // WORD), dtype=torch.int32)
    return words, error.new_empty(-(-n // BLOCK))


def _decompress(
    words: torch.Tensor, scales: torch.Tensor, n: int, dtype: torch.dtype
) -> torch.Tensor:
    if backend_for(scales) is Backend.TRITON:
        from stoker_kernels.ops.onebit import triton

        return triton.decompress(words.contiguous(), scales.contiguous(), n, dtype)
    return reference.decompress(words, scales, n, dtype)


def _decompress_fake(
    words: torch.Tensor, scales: torch.Tensor, n: int, dtype: torch.dtype
) -> torch.Tensor:
    return scales.new_empty(n, dtype=dtype)


_COMPRESS = register_op(
    "onebit_compress", "(Tensor gradient, Tensor(a!) error) -> (Tensor, Tensor)",
    _compress, _compress_fake,
)  # fmt: skip
_DECOMPRESS = register_op(
    "onebit_decompress", "(Tensor words, Tensor scales, int n, ScalarType dtype) -> Tensor",
    _decompress, _decompress_fake,
)  # fmt: skip


@torch.no_grad()
def onebit_compress(
    gradient: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compress ``gradient + error`` to signs; ``error`` becomes what they leave out.

    ``gradient`` has n values of any shape; ``error`` (n,) is contiguous, fp32 (fp64 for fp64
    gradients), zeros at first, and is updated in place. Returns words (ceil(n/32),) int32 and scales
    (ceil(n/BLOCK),) of ``error``'s dtype. Raises ``ValueError`` where ``error`` does not fit.
    """
    wanted = compute_dtype(gradient.dtype)
    if error.shape != (gradient.numel(),) or error.dtype != wanted or not error.is_contiguous():
        raise ValueError(
            f"onebit_compress: error must be contiguous, of shape ({gradient.numel()},) and {wanted}, "
            f"got {tuple(error.shape)} {error.dtype}"
        )
    words, scales = _COMPRESS(gradient.reshape(-1), error)
    return words, scales


@torch.no_grad()
def onebit_decompress(
    words: torch.Tensor, scales: torch.Tensor, n: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the mean (n,) in ``dtype`` of W messages: words (W, ceil(n/32)), scales (W, ceil(n/BLOCK)).

    Messages are added in their order, so all receivers get the same bits. Raises ``ValueError`` for
    sizes that do not belong to n values.
    """
    if words.ndim != 2 or words.shape[0] < 1 or words.shape[1] != -(-n // WORD):
        raise ValueError(
            f"onebit_decompress: words must be (W, {-(-n // WORD)}) for {n} values, "
            f"got {tuple(words.shape)}"
        )
    if scales.shape != (words.shape[0], -(-n // BLOCK)):
        raise ValueError(
            f"onebit_decompress: scales must be ({words.shape[0]}, {-(-n // BLOCK)}) for {n} values, "
            f"got {tuple(scales.shape)}"
        )
    return _DECOMPRESS(words, scales, n, dtype)
