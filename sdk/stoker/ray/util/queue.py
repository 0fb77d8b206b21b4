"""``ray.util.queue``."""

from stoker.util.queue import Empty, Full, Queue

__all__ = ("Empty", "Full", "Queue")
