"""``ray.actor``: handles, classes, and the end of an actor by itself."""

from __future__ import annotations

from typing import Any

from stoker.api.actors import exit_actor
from stoker.ray.mapping.lacking import attribute_error
from stoker.ray.mapping.remote import ActorClass, method
from stoker.runtime.actors.handle import ActorHandle, ActorMethod

ActorProxy = ActorHandle

__all__ = ("ActorClass", "ActorHandle", "ActorMethod", "ActorProxy", "exit_actor", "method")


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
