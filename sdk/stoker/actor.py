"""Actors by the name of the module that Ray has them in: ``from stoker.actor import exit_actor``."""

from __future__ import annotations

from stoker.api.actors import ActorClass, exit_actor, method
from stoker.runtime.actors.handle import ActorHandle, ActorMethod

__all__ = ("ActorClass", "ActorHandle", "ActorMethod", "exit_actor", "method")
