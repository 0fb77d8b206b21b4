"""RMSNorm over the last dimension: ``y = x / sqrt(mean(x^2) + eps) * weight``."""

from __future__ import annotations

from stoker_kernels.ops.rms_norm.autograd import RMSNorm, rms_norm

__all__ = ("RMSNorm", "rms_norm")
