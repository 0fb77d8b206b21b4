"""K-FAC: natural gradient with a Kronecker-factored Fisher matrix (Martens and Grosse 2015)."""

from __future__ import annotations

from stoker_kernels.optim.kfac.optimizer import KFAC

__all__ = ("KFAC",)
