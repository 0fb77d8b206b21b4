"""``ray.util.joblib``: scikit-learn and others over the cluster by ``parallel_backend("ray")``."""

from __future__ import annotations

import importlib

__all__ = ("register_ray",)


def register_ray() -> None:
    """Register the backend of Stoker with joblib, under the name ``ray``."""
    importlib.import_module("stoker.util.joblib").register_stoker("ray")
