"""Ray's names for Stoker: ``import stoker.ray as ray`` in a program that was written for Ray.

::

    import stoker.ray as ray

    ray.init(num_cpus=4)

    @ray.remote
    def square(x):
        return x * x

    print(ray.get([square.remote(i) for i in range(4)]))

It maps names and keywords; what a name does is built in Stoker. ``docs/from-ray.md`` says what is meant
differently in Stoker, and why. What is lacking raises an error that names the Stoker way, and ``stoker
port FILE`` lists what of a program will not work. ``stoker.ray.install()`` answers ``import ray`` for all
modules of a program, and ``python -m stoker.ray FILE`` runs one as it is. Ray itself is not needed.
"""

from __future__ import annotations

import importlib
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from stoker import is_initialized, kill
from stoker.ray._raylet import (
    ActorID,
    DynamicObjectRefGenerator,
    JobID,
    NodeID,
    ObjectID,
    ObjectRef,
    ObjectRefGenerator,
    PlacementGroupID,
    StreamingObjectRefGenerator,
    TaskID,
    UniqueID,
    WorkerID,
)
from stoker.ray.job_config import JobConfig
from stoker.ray.mapping.calls import (
    available_resources,
    cancel,
    cluster_resources,
    get,
    get_actor,
    get_gpu_ids,
    nodes,
    put,
    show_in_dashboard,
    shutdown,
    timeline,
    wait,
)
from stoker.ray.mapping.init import RAY_VERSION as __version__
from stoker.ray.mapping.init import RayContext, init
from stoker.ray.mapping.lacking import NotInStokerError, attribute_error
from stoker.ray.mapping.remote import method, remote
from stoker.ray.runtime_context import get_runtime_context
from stoker.ray.runtime_env import AS_RAY

if TYPE_CHECKING:
    from stoker.ray import (
        actor,
        cloudpickle,
        dag,
        exceptions,
        experimental,
        job_config,
        job_submission,
        runtime_context,
        runtime_env,
        util,
    )

__all__ = (
    "LOCAL_MODE",
    "SCRIPT_MODE",
    "WORKER_MODE",
    "ActorID",
    "DynamicObjectRefGenerator",
    "JobConfig",
    "JobID",
    "Language",
    "LoggingConfig",
    "NodeID",
    "NotInStokerError",
    "ObjectID",
    "ObjectRef",
    "ObjectRefGenerator",
    "PlacementGroupID",
    "RayContext",
    "StreamingObjectRefGenerator",
    "TaskID",
    "UniqueID",
    "WorkerID",
    "__version__",
    "actor",
    "available_resources",
    "cancel",
    "cloudpickle",
    "cluster_resources",
    "dag",
    "exceptions",
    "experimental",
    "get",
    "get_actor",
    "get_gpu_ids",
    "get_runtime_context",
    "init",
    "install",
    "is_initialized",
    "job_config",
    "job_submission",
    "kill",
    "logger",
    "method",
    "nodes",
    "put",
    "remote",
    "runtime_context",
    "runtime_env",
    "show_in_dashboard",
    "shutdown",
    "timeline",
    "util",
    "wait",
)

SCRIPT_MODE, WORKER_MODE, LOCAL_MODE = 0, 1, 2
logger = logging.getLogger("stoker.ray")

_MODULES = (
    *("actor", "cloudpickle", "dag", "exceptions", "experimental", "job_submission"),
    *("job_config", "runtime_context", "runtime_env", "util", "_private"),
)


class Language(Enum):
    """Languages of functions: Stoker runs one."""

    PYTHON = 0


class LoggingConfig:
    """The ``logging_config`` of ``init``: accepted, without effect."""

    def __init__(self, **options: Any) -> None:
        self.options = options


def install() -> None:
    """Answer ``import ray``, here and in the workers of this process's job, by this package.

    Call it before the first ``import ray`` and before ``init()``. ``ConflictError`` where Ray is installed.
    """
    from stoker.runtime.process.current_runtime import LIFECYCLE

    importlib.import_module(AS_RAY)
    LIFECYCLE.init = init


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"stoker.ray.{name}")
    raise attribute_error(__name__, name)
