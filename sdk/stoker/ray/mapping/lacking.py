"""The names of Ray that Stoker lacks, each with the Stoker way: the texts of the errors.

One table, for attributes, for imports, and for ``stoker port``.
"""

from __future__ import annotations

import sys
import warnings
from types import MappingProxyType
from typing import Any, Final

from stoker_wire.errors import StokerError

_SCOPE = "Stoker is a scheduler and has no library of this kind"
LACKING: Final = MappingProxyType(
    {
        "tune": f"{_SCOPE}; run trials as tasks, or ask an optimiser of its own (Optuna's ask and tell) "
        "for their parameters",
        "serve": f"{_SCOPE}; a named actor answers calls, and an HTTP server may run in one",
        "data": f"{_SCOPE}; read partitions in tasks, or use a library of data frames inside of them",
        "rllib": f"{_SCOPE}; roll-out workers are actors",
        "train": f"{_SCOPE}; see stoker.train for process groups, and placement groups for gangs",
        "air": f"{_SCOPE}; see stoker.train",
        "ml": f"{_SCOPE}; see stoker.train",
        "workflow": f"{_SCOPE}; chain tasks by refs, keep results with lifetime='detached' or "
        "cache='cluster', or order jobs with after=",
        "llm": f"{_SCOPE}; an engine of inference may run in actors",
        "autoscaler": "nodes join by `stoker start --address`; see docs/nodes.md",
        "client": "give stoker.init() the address of a gateway; see docs/gateway.md",
        "java_function": "Stoker runs Python",
        "java_actor_class": "Stoker runs Python",
        "cpp_function": "Stoker runs Python; call C++ by ctypes, or as a process",
        "cross_language": "Stoker runs Python",
        **{
            f"_private.{name}": "these are Ray's internals"
            for name in ("services", "state", "test_utils", "utils", "worker")
        },
        "core": "these are Ray's internals",
        "widgets": "stoker.init() prints no widget",
        "scripts": "the command line is `stoker`",
        "cluster_utils": "start nodes with `stoker start`; see docs/nodes.md",
        **{
            f"util.collective.{name}": "an actor uses one GPU here; give each GPU an actor of its own"
            for name in (
                "allreduce_multigpu",
                "reduce_multigpu",
                "broadcast_multigpu",
                "allgather_multigpu",
                "reducescatter_multigpu",
                "send_multigpu",
                "recv_multigpu",
                "synchronize",
            )
        },
        "util.dask": "stoker.dask_get is Dask's scheduler here; see docs/from-dask.md",
        "util.spark": "run Spark beside Stoker",
        "util.sgd": "see stoker.train",
        "util.tracing": "`stoker timeline` writes what ran where and when",
        "util.rpdb": "attach a debugger to the pid that `stoker list workers` shows",
        "util.pdb": "attach a debugger to the pid that `stoker list workers` shows",
        "util.client": "give stoker.init() the address of a gateway; see docs/gateway.md",
        "util.client_connect": "give stoker.init() the address of a gateway; see docs/gateway.md",
        "util.tpu": "Stoker schedules GPUs; offer others as resources of nodes",
        "util.lightgbm": f"{_SCOPE}; run it in actors of a placement group",
        "util.xgboost": f"{_SCOPE}; run it in actors of a placement group",
        "experimental.channel": "pass refs: values of a node are in shared memory",
        "experimental.collective": "use stoker.ray.util.collective",
        "experimental.internal_kv": "use stoker.kv",
        "experimental.dynamic_resources": "give a node its resources when it starts",
        "experimental.compiled_dag_ref": "a graph's execute() returns an ObjectRef",
        "internal": "stoker.free() frees objects",
    }
)
"""By the name below ``ray``; what begins with one of them and a dot is lacking as well."""

_warned: set[str] = set()


class NotInStokerError(StokerError, ImportError):
    """A name of Ray that Stoker does not have; the message names the Stoker way."""

    code = "not_in_stoker"


def reason(name: str) -> str | None:
    """Return why a name below ``ray`` is lacking, and what to do; None if it is not."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        known = LACKING.get(".".join(parts[:count]))
        if known is not None:
            return known
    return None


def lacking(name: str) -> NotInStokerError:
    """Return the error for a name below ``ray`` that is in the table."""
    return NotInStokerError(f"ray.{name} is not in Stoker\n{reason(name)}", field=name)


def attribute_error(module: str, name: str) -> Exception:
    """Return the error for an attribute that a module below ``stoker.ray`` does not have."""
    below = f"{module.removeprefix('stoker.ray').lstrip('.')}.{name}".lstrip(".")
    if reason(below) is not None:
        return lacking(below)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def warn_once(text: str, *, stacklevel: int = 3) -> None:
    """Warn of something that is accepted and without effect, once per process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=stacklevel)


def is_loaded(module: str) -> bool:
    """Return whether a module has been imported."""
    return module in sys.modules


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""
