"""``ray.util.joblib``: scikit-learn and others over the cluster by ``parallel_backend("ray")``."""

from __future__ import annotations

__all__ = ("register_ray",)


def register_ray() -> None:
    """Make ``"ray"`` a backend of joblib: the one that is called ``"stoker"`` otherwise."""
    from joblib import register_parallel_backend

    from stoker.util.joblib import StokerBackend

    register_parallel_backend("ray", StokerBackend)
