"""``dask_get``: Dask's graphs as tasks, ``dask.compute(..., scheduler=stoker.dask_get)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dask._task_spec import Alias, DataNode, convert_legacy_graph
from dask.core import flatten
from dask.order import order
from dask.utils import key_split

from stoker.api.calls import get, put
from stoker.api.remote import RemoteFunction, remote_with
from stoker.runtime import current

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef


def dask_get(
    dsk: Any,
    keys: Any,
    *,
    stoker_options: Mapping[str, Any] | None = None,
    **ignored: Any,
) -> Any:
    """Return the values of ``keys`` (a key, or nested lists of keys) of a Dask graph.

    ::

        dask.compute(frame.groupby("x").y.mean(), scheduler=stoker.dask_get)
        dask.config.set(scheduler=stoker.dask_get)

    Each task of the graph is a task of the cluster, whose arguments are refs: values in between stay in
    shared memory, on the node that made them, and are freed when nothing needs them. ``stoker_options``
    are those of ``@stoker.remote`` for all tasks. Other keywords, such as ``num_workers``, are taken
    and have no effect.

    An error comes out as its own type; Ctrl-C and errors cancel what is under way.
    """
    if not isinstance(dsk, Mapping):
        dsk = dsk.__dask_graph__()
    graph = convert_legacy_graph(dsk)
    refs = _submit(graph, dict(stoker_options or {}))
    task_ids = [ref.task_id for ref in refs.values() if ref.task_id]
    wanted = list(dict.fromkeys(flatten(keys if isinstance(keys, list) else [keys])))
    results = [refs[key] for key in wanted]
    del refs  # those of values in between are held by the tasks that need them, and no longer
    try:
        values = dict(zip(wanted, get(results), strict=True))
    except BaseException:
        for task_id in task_ids:  # those that ended are left alone
            current.runtime().pending.cancel_soon(task_id)
        raise
    return _nested(keys, values)


def _submit(graph: Mapping[Any, Any], options: dict[str, Any]) -> dict[Any, ObjectRef[Any]]:
    """Submit all tasks, those that others need first; return the refs of all keys."""
    refs: dict[Any, ObjectRef[Any]] = {}
    functions: dict[str, RemoteFunction[..., Any]] = {}
    priorities = order(graph)
    for key in sorted(graph, key=priorities.__getitem__):
        node = graph[key]
        if isinstance(node, Alias):
            refs[key] = refs[node.target]
        elif isinstance(node, DataNode):
            refs[key] = put(node.value)
        else:
            name = str(key_split(key))
            function = functions.get(name)
            if function is None:
                function = functions[name] = remote_with(_run, {"name": name, **options})
            needed = tuple(node.dependencies)
            refs[key] = function.remote(node, needed, *(refs[other] for other in needed))
    return refs


def _run(node: Any, needed: tuple[Any, ...], /, *values: Any) -> Any:
    return node(dict(zip(needed, values, strict=True)))


def _nested(keys: Any, values: dict[Any, Any]) -> Any:
    """Return ``keys`` as they were given, with the values in their places."""
    return tuple(_nested(key, values) for key in keys) if isinstance(keys, list) else values[keys]
