"""The largest values of an accumulated gradient, in messages of a fixed size; the rest is kept."""

from __future__ import annotations

from stoker_kernels.ops.sparsify.autograd import above_compress, topk_compress

__all__ = ("above_compress", "topk_compress")
