"""Optimizer steps on the GPU: ``launchers`` runs ``kernels``, ``trust_kernels`` and ``scalar_kernels``."""

from __future__ import annotations

from stoker_kernels.optim.triton.launchers import square_sums, update

__all__ = ("square_sums", "update")
