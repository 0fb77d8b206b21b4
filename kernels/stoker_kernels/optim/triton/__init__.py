"""Optimizer steps on the GPU: ``launchers`` runs the modules of kernels."""

from __future__ import annotations

from stoker_kernels.optim.triton.launchers import square_sums, trust_squares, update

__all__ = ("square_sums", "trust_squares", "update")
