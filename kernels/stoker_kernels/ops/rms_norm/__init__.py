"""RMSNorm over the last dimension, optionally of a sum with the residual stream."""

from __future__ import annotations

from stoker_kernels.ops.rms_norm.autograd import RMSNorm, rms_norm

__all__ = ("RMSNorm", "rms_norm")
