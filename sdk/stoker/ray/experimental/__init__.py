"""``ray.experimental``: where objects are, and progress bars."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stoker.ray.mapping.lacking import attribute_error

if TYPE_CHECKING:
    import stoker


def get_object_locations(
    obj_refs: list[stoker.ObjectRef[Any]], timeout_ms: int = -1
) -> dict[stoker.ObjectRef[Any], dict[str, Any]]:
    """Return where the values of refs are that exist: ids of nodes, and the size."""
    found: dict[stoker.ObjectRef[Any], dict[str, Any]] = {}
    for ref in obj_refs:
        location = ref._entry.location
        node_id = getattr(location, "node_id", "")
        found[ref] = {
            "node_ids": [node_id] if node_id else [],
            "object_size": getattr(location, "nbytes", None),
            "did_spill": False,
        }
    return found


get_local_object_locations = get_object_locations


def __getattr__(name: str) -> Any:
    if name == "tqdm_ray":
        return importlib.import_module("stoker.ray.experimental.tqdm_ray")
    raise attribute_error(__name__, name)
