"""``stoker.util``: Python's own interfaces over a cluster, and small tools made of actors.

What only some programs use is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.util.actor_pool import ActorPool
from stoker.util.queue import Empty, Full, Queue

if TYPE_CHECKING:
    from stoker.util.dask import dask_get
    from stoker.util.executor import Executor
    from stoker.util.joblib import register_stoker
    from stoker.util.pool import Pool
    from stoker.util.progress import tqdm
    from stoker.util.streams import map_stream

__all__ = (
    "ActorPool",
    "Empty",
    "Executor",
    "Full",
    "Pool",
    "Queue",
    "dask_get",
    "map_stream",
    "register_stoker",
    "tqdm",
)

_LAZY = {
    "Executor": "executor",
    "Pool": "pool",
    "dask_get": "dask",
    "map_stream": "streams",
    "register_stoker": "joblib",
    "tqdm": "progress",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"stoker.util.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'stoker.util' has no attribute {name!r}")
