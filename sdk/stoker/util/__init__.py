"""``stoker.util``: small things made of actors, in the field's shape."""

from stoker.util.actor_pool import ActorPool
from stoker.util.queue import Empty, Full, Queue

__all__ = ("ActorPool", "Empty", "Full", "Queue")
