"""Adasum: gradients of several workers combined by how much they agree, layer by layer."""

from __future__ import annotations

from stoker_kernels.ops.adasum.autograd import adasum

__all__ = ("adasum",)
