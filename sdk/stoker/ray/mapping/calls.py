"""Ray's functions that differ from Stoker's in keywords, or in the shape of what they return."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import stoker
from stoker.ray.mapping.lacking import warn_once
from stoker.ray.util.scheduling_strategies import HEAD, NODE

_DEAD = 2
"""Ray's number for a node that ended unexpectedly."""


def get(object_refs: Any, *, timeout: float | None = None, _use_object_store: bool = False) -> Any:
    """Return the value of a ref, or the values of a list of refs."""
    return stoker.get(object_refs, timeout=timeout)


def put(value: Any, *, _owner: Any = None, _tensor_transport: Any = None) -> stoker.ObjectRef[Any]:
    """Store a value; return its ref. With ``_owner`` it is that actor which owns it."""
    if _owner is None:
        return stoker.put(value)
    (ref,) = stoker.get(_owner.__stoker_call__.remote(_put_here, [value]))
    return ref  # type: ignore[no-any-return]


def _put_here(_actor: Any, values: list[Any]) -> list[stoker.ObjectRef[Any]]:
    return [stoker.put(value) for value in values]


def wait(
    ray_waitables: Sequence[Any] | None = None,
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,
    object_refs: Sequence[Any] | None = None,
) -> tuple[list[Any], list[Any]]:
    """Wait until ``num_returns`` of refs and generators are ready; return (ready, not ready)."""
    waited: Any = ray_waitables if ray_waitables is not None else object_refs
    if isinstance(waited, Sequence) and not waited:
        return [], []
    return stoker.wait(waited, num_returns=num_returns, timeout=timeout)


def cancel(ray_waitable: Any, *, force: bool = False, recursive: bool = True) -> None:
    """Stop the task that makes a ref, or that yields."""
    stoker.cancel(ray_waitable, force=force, recursive=recursive)


def get_actor(name: str, namespace: str | None = None) -> stoker.ActorHandle[Any]:
    """Return a handle to the living actor of this name; ``ValueError`` if there is none."""
    return stoker.get_actor(name, namespace=namespace)


def get_gpu_ids() -> list[int]:
    """Return the device indices that this worker may use."""
    return stoker.get_gpu_ids()


def shutdown(_exiting_interpreter: bool = False) -> None:
    """Leave the cluster; one that ``init()`` started stops. The next call starts another, as in Ray."""
    from stoker.runtime.process.current_runtime import LIFECYCLE

    stoker.shutdown()
    LIFECYCLE.auto_init = not _exiting_interpreter


def timeline(filename: str | None = None) -> list[dict[str, Any]] | None:
    """Return the tasks of this job as Chrome trace events, or write them to a file."""
    events = stoker.timeline(filename)
    return None if filename else events


def nodes() -> list[dict[str, Any]]:
    """Return the cluster's nodes, living and dead, in Ray's shape."""
    return [node_record(node) for node in stoker.nodes()]


def node_record(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a node in Ray's shape."""
    alive = node["state"] != "DEAD"
    url = urlsplit(node["url"])
    address, port = url.hostname or "", url.port or 0
    resources = {**node["resources"], f"{NODE}{address}": 1.0}
    if node["labels"].get("stoker.io/head"):
        resources[f"{NODE}{HEAD}"] = 1.0
    return {
        "NodeID": node["node_id"],
        "Alive": alive,
        "NodeManagerAddress": address,
        "NodeManagerHostname": node["hostname"],
        "NodeManagerPort": port,
        "ObjectManagerPort": port,
        "ObjectStoreSocketName": node["arena_dir"],
        "RayletSocketName": node["unix"],
        "MetricsExportPort": port,
        "NodeName": node["hostname"],
        "RuntimeEnvAgentPort": port,
        "DeathReason": 0 if alive else _DEAD,
        "DeathReasonMessage": node.get("reason", ""),
        "alive": alive,
        "Resources": resources if alive else {},
        "Labels": {"ray.io/node-id": node["node_id"], **node["labels"]},
    }


def cluster_resources() -> dict[str, float]:
    """Return the sum of all nodes' resources, with one ``node:ADDRESS`` for each that lives."""
    return {**stoker.cluster_resources(), **_places()}


def available_resources() -> dict[str, float]:
    """Return what no lease holds; without what there is none of."""
    free = {name: amount for name, amount in stoker.available_resources().items() if amount}
    return {**free, **_places()}


def _places() -> dict[str, float]:
    places: dict[str, float] = {}
    for node in nodes():
        if node["Alive"]:
            for name, amount in node["Resources"].items():
                if name.startswith(NODE):
                    places[name] = places.get(name, 0.0) + amount
    return places


def list_named_actors(all_namespaces: bool = False) -> list[Any]:
    """Return the names of living actors, or with ``all_namespaces`` mappings with name and namespace."""
    from stoker.api.calls import list_all

    living = [a for a in list_all("/v1/actors") if a["name"] and a["state"] != "DEAD"]
    if all_namespaces:
        return [{"name": a["name"], "namespace": a["namespace"]} for a in living]
    here = stoker.get_runtime_context().namespace
    return [a["name"] for a in living if a["namespace"] == here]


def get_node_ip_address() -> str:
    """Return the address of this process's node."""
    node_id = stoker.get_runtime_context().node_id if stoker.is_initialized() else ""
    for node in stoker.nodes() if node_id else ():
        if node["node_id"] == node_id:
            return urlsplit(node["url"]).hostname or "127.0.0.1"
    return "127.0.0.1"


def as_completed(
    refs: Sequence[Any], *, chunk_size: int = 10, yield_obj_refs: bool = False, **options: Any
) -> Any:
    """Yield the values of refs (or refs) as they are there, in the order in which they come."""
    left = list(refs)
    while left:
        ready, left = stoker.wait(left, num_returns=1, **options)
        more, left = stoker.wait(left, num_returns=len(left), timeout=0) if left else ([], [])
        for ref in (*ready, *more):
            yield ref if yield_obj_refs else stoker.get(ref)


def map_unordered(
    fn: Any,
    items: Any,
    *,
    backpressure_size: int | None = 100,
    chunk_size: int = 10,
    yield_obj_refs: bool = False,
    **options: Any,
) -> Any:
    """Yield ``fn.remote(item)`` of all items as they end; so many run or wait at once."""
    running: list[Any] = []
    for item in items:
        if backpressure_size and len(running) >= backpressure_size:
            ready, running = stoker.wait(running, num_returns=1, **options)
            yield from ready if yield_obj_refs else stoker.get(ready)
        running.append(fn.remote(item))
    yield from as_completed(running, yield_obj_refs=yield_obj_refs, **options)


def inspect_serializability(
    base_obj: Any, name: str | None = None, depth: int = 3, print_file: Any = None
) -> tuple[bool, set[FailureTuple]]:
    """Return whether a value pickles, and what in it does not; print the path to it."""
    from stoker.exceptions import SerializationError
    from stoker.runtime.serialization.pickling import pack

    what = name or getattr(base_obj, "__qualname__", None) or repr(base_obj)
    try:
        pack(base_obj, what=what)
    except SerializationError as error:
        print(str(error), file=print_file)
        return False, set(_failures(base_obj, what, depth)) or {FailureTuple(base_obj, what, None)}
    return True, set()


class FailureTuple:
    """A part of a value that does not pickle."""

    def __init__(self, obj: Any, name: str, parent: Any) -> None:
        self.obj = obj
        self.name = name
        self.parent = parent

    def __repr__(self) -> str:
        return f"FailTuple({self.name} [obj={self.obj!r}, parent={self.parent!r}])"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FailureTuple) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def _failures(value: Any, name: str, depth: int) -> list[FailureTuple]:
    """Return the innermost parts of a value that do not pickle, ``depth`` levels down at most."""
    found: list[FailureTuple] = []
    for part_name, part in _parts(value).items():
        if _pickles(part):
            continue
        inner = _failures(part, part_name, depth - 1) if depth > 1 else []
        found += inner or [FailureTuple(part, part_name, value)]
    return found


def _parts(value: Any) -> dict[str, Any]:
    if inspect.isfunction(value):
        closed = inspect.getclosurevars(value)
        return {**closed.nonlocals, **closed.globals}
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return {str(index): each for index, each in enumerate(value)}
    return dict(getattr(value, "__dict__", {}))


def _pickles(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def register_serializer(
    cls: type, *, serializer: Callable[[Any], Any], deserializer: Callable[[Any], Any]
) -> None:
    """Pickle values of a class, in this process, as what ``serializer`` makes of them."""

    def reduce(value: Any) -> tuple[Any, ...]:
        return deserializer, (serializer(value),)

    copyreg.pickle(cls, reduce)


def deregister_serializer(cls: type) -> None:
    """Pickle values of a class as they pickle by themselves."""
    copyreg.dispatch_table.pop(cls, None)


def connect(address: str, **options: Any) -> Any:
    """Connect to a cluster by its address, as ``init`` does."""
    from stoker.ray.mapping.init import init

    return init(address, **{k: v for k, v in options.items() if k in ("namespace", "runtime_env")})


def log_once(key: str) -> bool:
    """Return True the first time that it is called with ``key`` in this process."""
    if key in _logged:
        return False
    _logged.add(key)
    return True


_logged: set[str] = set()


def show_in_dashboard(*_args: Any, **_kwargs: Any) -> None:
    """Warn that there is nowhere to show it."""
    warn_once("show_in_dashboard() has no effect in Stoker: print it, `stoker logs` shows it")
