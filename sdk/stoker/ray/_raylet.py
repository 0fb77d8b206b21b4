"""``ray._raylet``: the refs and ids that programs import from there."""

from __future__ import annotations

from typing import Any

from stoker import ObjectRef, ObjectRefGenerator
from stoker.ray.mapping.ids import Id
from stoker.ray.mapping.lacking import attribute_error

ObjectID = ObjectRef
StreamingObjectRefGenerator = ObjectRefGenerator
DynamicObjectRefGenerator = tuple  # type: ignore[type-arg]
"""The value of a task with ``num_returns="dynamic"``: its refs."""
ActorID = JobID = NodeID = PlacementGroupID = TaskID = WorkerID = UniqueID = Id
"""Ids are texts."""

__all__ = (
    "ActorID",
    "DynamicObjectRefGenerator",
    "JobID",
    "NodeID",
    "ObjectID",
    "ObjectRef",
    "ObjectRefGenerator",
    "PlacementGroupID",
    "StreamingObjectRefGenerator",
    "TaskID",
    "UniqueID",
    "WorkerID",
)


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
