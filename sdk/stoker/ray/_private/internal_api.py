"""``ray._private.internal_api``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import stoker

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("free", "memory_summary")


def free(
    object_refs: stoker.ObjectRef[Any] | Sequence[stoker.ObjectRef[Any]], local_only: bool = False
) -> None:
    """Free the values of refs now."""
    stoker.free(object_refs)


def memory_summary(*_args: Any, **_options: Any) -> str:
    """Return the objects that are stored, a line each: id, size, node."""
    from stoker.ray.util.state import list_objects

    lines = [
        f"{one.object_id} {one.object_size} {one.node_id}" for one in list_objects(limit=10_000)
    ]
    return "\n".join(["object_id size node_id", *lines])
