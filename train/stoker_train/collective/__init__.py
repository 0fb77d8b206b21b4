"""``stoker.collective``: collectives between actors, whatever else their processes do.

::

    stoker.collective.init_group(actors)              # the driver; or join() in each member

    group = stoker.collective.group()                 # in an actor
    group.all_reduce(gradient, "mean")                # NumPy arrays and torch tensors, in place
    half = group.process_set([0, 1])                  # as a process set of Horovod

torch's default group stays free, and a process may be in many groups. A member that dies fails the calls of
all others by :class:`MemberLostError`, which names it. torch is imported when a group is made, not here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stoker_train.collective.channel import Backend, ReduceOp, usable
from stoker_train.collective.communicator import Communicator
from stoker_train.collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    MemberLostError,
    MismatchError,
)
from stoker_train.collective.group import Group
from stoker_train.collective.joining import destroy_group, group, init_group, is_initialized, join
from stoker_train.collective.lane import Handle

if TYPE_CHECKING:
    from stoker_train.collective.training.broadcasting import (
        broadcast_optimizer_state,
        broadcast_parameters,
    )
    from stoker_train.collective.training.optimizer import DistributedOptimizer

__all__ = (
    "Backend",
    "CollectiveError",
    "CollectiveTimeoutError",
    "Communicator",
    "DistributedOptimizer",
    "Group",
    "Handle",
    "MemberLostError",
    "MismatchError",
    "ReduceOp",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "destroy_group",
    "group",
    "init_group",
    "is_initialized",
    "join",
    "usable",
)

_WITH_TORCH = {
    "DistributedOptimizer": "stoker_train.collective.training.optimizer",
    "broadcast_optimizer_state": "stoker_train.collective.training.broadcasting",
    "broadcast_parameters": "stoker_train.collective.training.broadcasting",
}
"""What needs torch as it is imported, and the module that has it."""


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        return getattr(importlib.import_module(_WITH_TORCH[name]), name)
    raise AttributeError(f"module 'stoker.collective' has no attribute {name!r}")
