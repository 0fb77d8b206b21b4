"""Signs of a gradient as packed bits with one scale per block, and the error fed back."""

from __future__ import annotations

from stoker_kernels.ops.onebit.autograd import BLOCK, onebit_compress, onebit_decompress

__all__ = ("BLOCK", "onebit_compress", "onebit_decompress")
