"""Gated linear units on one packed tensor: SwiGLU and GeGLU."""

from __future__ import annotations

from stoker_kernels.ops.glu.autograd import GeGLU, SwiGLU, geglu, swiglu

__all__ = ("GeGLU", "SwiGLU", "geglu", "swiglu")
