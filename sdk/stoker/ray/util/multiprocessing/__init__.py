"""``ray.util.multiprocessing``: a ``Pool`` whose processes are anywhere in the cluster."""

from stoker.ray.util.multiprocessing.pool import JoinableQueue, Pool, TimeoutError

__all__ = ("JoinableQueue", "Pool", "TimeoutError")
