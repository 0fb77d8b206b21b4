"""``ray.util.actor_pool``."""

from stoker.util.actor_pool import ActorPool

__all__ = ("ActorPool",)
