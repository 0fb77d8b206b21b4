"""``stoker.util``: small tools made of actors, with the usual interfaces."""

from stoker.util.actor_pool import ActorPool
from stoker.util.queue import Empty, Full, Queue

__all__ = ("ActorPool", "Empty", "Full", "Queue")
