"""``ray.util``: each name where Ray has it; modules are imported when they are asked for."""

from __future__ import annotations

import importlib
from typing import Any

from stoker.ray.mapping.lacking import attribute_error

# At once: both a module and the function in it have the name, and Ray shows the function.
from stoker.ray.util.placement_group import (
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

_CALLS = "stoker.ray.mapping.calls"
_NAMES = {
    "ActorPool": "stoker.util.actor_pool",
    "as_completed": _CALLS,
    "connect": _CALLS,
    "get_node_ip_address": _CALLS,
    "inspect_serializability": _CALLS,
    "list_named_actors": _CALLS,
    "deregister_serializer": _CALLS,
    "log_once": _CALLS,
    "map_unordered": _CALLS,
    "register_serializer": _CALLS,
}
_MODULES = (
    *(
        "accelerators",
        "actor_pool",
        "annotations",
        "check_serialize",
        "collective",
        "debug",
        "iter",
    ),
    *("joblib", "metrics", "multiprocessing", "queue", "scheduling_strategies", "state"),
)
__all__ = (
    "get_current_placement_group",
    "get_placement_group",
    "placement_group",
    "placement_group_table",
    "remove_placement_group",
)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name == "disconnect":
        return importlib.import_module(_CALLS).shutdown
    raise attribute_error(__name__, name)
