"""``ray.util.joblib``: scikit-learn and others over the cluster by ``parallel_backend("ray")``."""

from __future__ import annotations

import importlib

__all__ = ("register_ray",)


def register_ray() -> None:
    """Make ``"ray"`` a backend of joblib: the one that is called ``"stoker"`` otherwise."""
    backend = importlib.import_module("stoker.util.joblib").StokerBackend
    importlib.import_module("joblib").register_parallel_backend("ray", backend)
