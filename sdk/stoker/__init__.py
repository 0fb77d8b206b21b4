"""Stoker keeps GPUs fed: remote functions, actors and objects on a cluster, or on this laptop.

::

    import stoker

    @stoker.remote
    def square(x: int) -> int:
        return x * x

    stoker.init()
    print(stoker.get([square.remote(i) for i in range(4)]))   # [0, 1, 4, 9]

Importing this module is cheap: the runtime (and aiohttp with it) loads at ``init()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker import exceptions
from stoker.api.actors import ActorClass, exit_actor, method
from stoker.api.arrays import empty
from stoker.api.calls import (
    available_resources,
    cancel,
    cluster_resources,
    get,
    get_actor,
    get_gpu_ids,
    get_runtime_context,
    is_initialized,
    kill,
    nodes,
    put,
    timeline,
    wait,
)
from stoker.api.init import ClusterInfo, init, shutdown
from stoker.api.objects import free, get_ref
from stoker.api.placement_groups import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from stoker.api.remote import RemoteFunction, remote
from stoker.api.stops import on_stop, preemption_notice
from stoker.api.tracing.profile import profile
from stoker.runtime.actors.handle import ActorHandle
from stoker.runtime.objects.refs import ObjectRef, ObjectRefGenerator
from stoker.runtime.options.strategies import NodeAffinity, PlacementGroupSchedulingStrategy
from stoker.runtime.process.stops import PreemptionNotice
from stoker_wire.version import VERSION as __version__

if TYPE_CHECKING:
    from stoker import actor, collective, data, jobs, kernels, kv, ps, train, util
    from stoker.api.registration import register, unregister
    from stoker.util import Executor, dask_get, map_stream, tqdm

__all__ = (
    "ActorClass",
    "ActorHandle",
    "ClusterInfo",
    "Executor",
    "NodeAffinity",
    "ObjectRef",
    "ObjectRefGenerator",
    "PlacementGroup",
    "PlacementGroupSchedulingStrategy",
    "PreemptionNotice",
    "RemoteFunction",
    "__version__",
    "actor",
    "available_resources",
    "cancel",
    "cluster_resources",
    "collective",
    "dask_get",
    "data",
    "empty",
    "exceptions",
    "exit_actor",
    "free",
    "get",
    "get_actor",
    "get_current_placement_group",
    "get_gpu_ids",
    "get_placement_group",
    "get_ref",
    "get_runtime_context",
    "init",
    "is_initialized",
    "jobs",
    "kernels",
    "kill",
    "kv",
    "map_stream",
    "method",
    "nodes",
    "on_stop",
    "placement_group",
    "placement_group_table",
    "plan_training",
    "preemption_notice",
    "profile",
    "ps",
    "put",
    "register",
    "remote",
    "remove_placement_group",
    "shutdown",
    "timeline",
    "tqdm",
    "train",
    "unregister",
    "util",
    "wait",
)

_LAZY = ("actor", "collective", "data", "jobs", "kernels", "kv", "ps", "ray", "train", "util")
_OF_UTIL = ("Executor", "dask_get", "map_stream", "tqdm")
_OF_REGISTRATION = ("register", "unregister")
_OF_TRAIN = ("plan_training",)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return importlib.import_module(f"stoker.{name}")
    if name in _OF_UTIL:
        from stoker import util

        return getattr(util, name)
    if name in _OF_REGISTRATION:
        from stoker.api import registration

        return getattr(registration, name)
    if name in _OF_TRAIN:
        from stoker import train

        return getattr(train, name)
    raise AttributeError(f"module 'stoker' has no attribute {name!r}")
