"""``ray.util.multiprocessing.pool``: Stoker's ``Pool``, which starts a cluster if there is none."""

from __future__ import annotations

from multiprocessing import JoinableQueue, TimeoutError
from typing import Any

from stoker.util.pool import Pool as StokerPool

__all__ = ("JoinableQueue", "Pool", "TimeoutError")


def Pool(
    processes: int | None = None,
    initializer: Any = None,
    initargs: Any = (),
    maxtasksperchild: int | None = None,
    context: Any = None,
    ray_address: str | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> StokerPool:
    """Return a pool with ``multiprocessing``'s interface; ``ray_address`` names the cluster."""
    import stoker
    from stoker.ray.mapping.init import init
    from stoker.ray.mapping.remote import mapped_options

    if ray_address is not None and not stoker.is_initialized():
        init(ray_address)
    options = mapped_options(ray_remote_args or {})
    return StokerPool(processes, initializer, initargs, maxtasksperchild, context, **options)
