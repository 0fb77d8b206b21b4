"""The functions of the public API: ``get``, ``put``, ``wait``, ``cancel``, ``kill``, and queries.

Arguments are checked here, so that a mistake is an error at the call; the work is the runtime's.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from stoker.api.context import RuntimeContext
from stoker.exceptions import BadRequestError, NotFoundError, WrongTypeError
from stoker.runtime import current
from stoker.runtime.objects.refs import ObjectRef, ObjectRefGenerator
from stoker.runtime.process.current_task import current_task
from stoker.runtime.process.notebook import shown_records
from stoker.runtime.process.tracing.context import TRACES
from stoker_wire.http.trace_context import split

if TYPE_CHECKING:
    from stoker.runtime.actors.handle import ActorHandle

T = TypeVar("T")
W = TypeVar("W", bound=ObjectRef[Any] | ObjectRefGenerator[Any])
_CALL_S = 30.0
_TIMELINE_ATTEMPTS = 100_000
_NODE_FIELDS = ("node_id", "hostname", "state", "resources", "labels", "reason")
"""What a notebook shows of a node."""


@overload
def get(refs: ObjectRef[T], /, *, timeout: float | None = None, progress: bool = False) -> T: ...
@overload
def get(
    refs: Sequence[ObjectRef[T]], /, *, timeout: float | None = None, progress: bool = False
) -> list[T]: ...


def get(refs: Any, /, *, timeout: float | None = None, progress: bool = False) -> Any:
    """Return the value of a ref, or the values of a list of refs, waiting for them.

    Raises what the task raised (as its own type, with the remote traceback), of a list as soon as
    the first of them fails; or ``GetTimeoutError`` after ``timeout`` seconds, which says what the
    missing ones wait for. Arrays from shared memory are read-only views. With ``progress`` a bar on
    stderr, or below a notebook's cell, counts the objects that are there.
    """
    if timeout is not None:
        _check_timeout(timeout, "get")
    if isinstance(refs, ObjectRefGenerator):
        raise WrongTypeError(
            "get() takes no generator\niterate over it and get() each ref", field="refs"
        )
    if progress:
        from stoker.util.progress import arrivals

        with arrivals([refs] if isinstance(refs, ObjectRef) else (refs := _refs(refs, "get"))):
            return get(refs, timeout=timeout)
    try:
        if isinstance(refs, ObjectRef):
            return current.runtime().objects.get((refs,), timeout)[0]
        return current.runtime().objects.get(_refs(refs, "get"), timeout)
    except KeyboardInterrupt as stop:
        raise stop.with_traceback(None)  # noqa: B904 (its note names the wait; internal frames add nothing)


def _check_timeout(timeout: Any, what: str) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise WrongTypeError(
            f"{what}(timeout={timeout!r}): give seconds as a number, or None to wait for ever",
            field="timeout",
        )
    if not float(timeout) >= 0:
        raise BadRequestError(
            f"{what}(timeout={timeout!r}): give seconds from 0, or None to wait for ever",
            field="timeout",
        )


def _refs(refs: Iterable[Any], what: str, *, generators: bool = False) -> list[ObjectRef[Any]]:
    # A generator of refs is iterable: as the list itself it would be read to its end.
    if isinstance(refs, (str, bytes, ObjectRefGenerator)) or not isinstance(refs, Iterable):
        raise WrongTypeError(
            f"{what}() takes an ObjectRef or a list of them, not {type(refs).__name__}\n"
            "only what .remote() and put() return can be waited for",
            field="refs",
        )
    checked = list(refs)
    for index, ref in enumerate(checked):
        if not isinstance(ref, ObjectRef) and not (
            generators and isinstance(ref, ObjectRefGenerator)
        ):
            raise WrongTypeError(
                f"{what}(): item {index} is a {type(ref).__name__}, not an ObjectRef",
                field=f"refs[{index}]",
            )
    return checked


def put(
    value: T,
    *,
    lifetime: str | None = None,
    name: str = "",
    namespace: str | None = None,
    copies: int = 1,
    disk: bool = False,
    path: str = "",
    tensor_transport: str | None = None,
) -> ObjectRef[T]:
    """Store a value and return its ref; large values go to shared memory, written once.

    With ``tensor_transport="cuda_ipc"`` its CUDA tensors stay on their GPU, as a copy that this process
    keeps while there are refs; readers on the node that see the GPU copy from there. It needs this process
    to live: a reader gets ``OwnerDiedError`` or ``ObjectLostError`` once it has ended. With ``"collective"``
    (or ``"collective:NAME"``) readers are the members of a group of ``stoker.collective`` that this process
    is in, on any node: tensors are sent to them by NCCL, or by gloo in a group of that.

    With ``lifetime="detached"`` the cluster owns it: it outlives this process and its job, until
    :func:`stoker.free`; ``get_ref(name)`` finds it, in this job's namespace unless another is given. So
    many nodes keep ``copies`` of it, in memory or with ``disk`` in files that outlive the nodelets; ``path``
    is a file besides, of any file system of fsspec, from which it is read when no node has it any more.

    Raises ``NameTakenError``, ``ArenaFullError``, or ``PayloadTooLargeError`` if the quota
    (``STOKER_DETACHED_MAX_BYTES``) has no room.
    """
    if lifetime is None:
        if name or namespace or copies != 1 or disk or path:
            raise BadRequestError(
                "put(): name, namespace, copies, disk and path are for detached objects\n"
                "say lifetime='detached' as well",
                field="lifetime",
            )
        objects = current.runtime().objects
        if tensor_transport is None:
            return objects.put(value)
        from stoker.runtime.objects.device_objects import put_on_device

        return put_on_device(objects, value, tensor_transport)
    if tensor_transport is not None:
        raise BadRequestError(
            "put(): tensor_transport keeps tensors in this process, a detached object outlives it\n"
            "leave out tensor_transport or lifetime",
            field="tensor_transport",
        )
    from stoker.api.objects import put_detached

    return put_detached(
        value, lifetime, name=name, namespace=namespace, copies=copies, disk=disk, path=path
    )


def wait(
    refs: Sequence[W],
    *,
    num_returns: int = 1,
    timeout: float | None = None,
    fetch_local: bool = True,
) -> tuple[list[W], list[W]]:
    """Wait until ``num_returns`` of ``refs`` are there (or failed), or ``timeout`` seconds passed.

    Returns (ready, not ready), both in the order of ``refs``. A generator of refs may be among them: it is
    ready when its next ref can be taken, or when it has ended. ``fetch_local`` is accepted for
    habit's sake: values are fetched when they are read.
    """
    if timeout is not None:
        _check_timeout(timeout, "wait")
    checked: list[Any] = _refs(refs, "wait", generators=True)
    if len(set(checked)) != len(checked):
        raise BadRequestError("wait(): the same ref is given twice", field="refs")
    given: object = num_returns
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise WrongTypeError(
            f"wait(): num_returns={given!r} is no whole number", field="num_returns"
        )
    if not 0 < num_returns <= len(checked):
        raise BadRequestError(
            f"wait(): num_returns={num_returns} must be between 1 and the {len(checked)} refs given",
            field="num_returns",
        )
    try:
        ready, rest = current.runtime().objects.wait(checked, num_returns, timeout)
        return cast("list[W]", ready), cast("list[W]", rest)
    except KeyboardInterrupt as stop:
        raise stop.with_traceback(None)  # noqa: B904 (as in get)


def cancel(
    ref: ObjectRef[Any] | ObjectRefGenerator[Any], *, force: bool = False, recursive: bool = True
) -> None:
    """Stop the task that makes ``ref``: its ``get`` then raises ``TaskCancelledError``.

    A waiting task never starts. A running one is interrupted as by Ctrl-C, once: its code and the processes
    that it has started in the foreground get SIGINT, which is ``KeyboardInterrupt`` unless it has set a
    handler. Whatever it raises then is ``TaskCancelledError`` at ``get``; one that returns has finished. With
    ``force`` its worker ends at once. ``recursive`` stops the tasks that it submitted as well. A finished
    task is left alone.

    A running call of an actor is told to stop: a coroutine by ``asyncio.CancelledError``, a sync
    actor's method as a task, and all by ``get_runtime_context().is_cancelled()``,
    which is what a method in a thread of its own must look at. If its code does not stop within a
    second, ``get`` raises ``TaskCancelledError`` that says that it still runs. ``force`` is refused
    for it with ``BadRequestError``: the process is that of all its callers, and ``kill`` ends it.
    Through a borrowed ref ``force`` is not known to be wrong, and is taken as a plain cancel.
    """
    if not isinstance(ref, (ObjectRef, ObjectRefGenerator)):
        raise WrongTypeError(
            f"cancel() takes one ObjectRef or generator, not {type(ref).__name__}\n"
            "to end an actor use kill()",
            field="ref",
        )
    if not ref.task_id:
        raise BadRequestError(f"cancel(): {ref!r} was put, no task makes it", field="ref")
    if force and current.runtime().actors.has_call(ref.task_id):
        raise BadRequestError(
            f"cancel(force=True): {ref!r} is a call of an actor\n"
            "its process is not that call's alone: cancel it without force, or end the actor "
            "with stoker.kill(actor)",
            field="force",
        )
    owner = ref._entry.owner if isinstance(ref, ObjectRef) else None
    if owner is None:
        current.runtime().pending.cancel_soon(ref.task_id, force=force, recursive=recursive)
    else:
        current.runtime().pending.cancel_at(owner, ref.task_id, force=force, recursive=recursive)


def kill(actor: ActorHandle[Any], *, no_restart: bool = True) -> None:
    """End an actor at once: its unfinished calls raise ``ActorDiedError``.

    Its ``stoker.on_stop`` callbacks, if it has any, may run for 5 s.
    """
    from stoker.runtime.actors.handle import ActorHandle

    if not isinstance(actor, ActorHandle):
        raise WrongTypeError(
            f"kill() takes an actor handle, not {type(actor).__name__}\nfor a task use cancel()",
            field="actor",
        )
    runtime = current.runtime()
    if runtime.inline is not None:
        runtime.inline.end(actor.actor_id, "killed by stoker.kill()", killed=True)
        return
    runtime.io.run(
        runtime.actors.kill(
            actor.actor_id, no_restart=no_restart, reason="killed by stoker.kill()"
        ),
        _CALL_S,
    )


def get_actor(name: str, *, namespace: str | None = None) -> ActorHandle[Any]:
    """Return a handle to the living actor with this name.

    ``NotFoundError`` (a ``ValueError`` and a ``LookupError``) if there is none.
    """
    for field, text in (("name", name), ("namespace", namespace)):
        if not isinstance(text, str) and (field == "name" or text is not None):
            raise WrongTypeError(
                f"get_actor(): {field}={text!r} is no text\n"
                f"give the {field} that the actor was created with",
                field=field,
            )
        if text is not None and not text.strip():
            raise BadRequestError(
                f"get_actor(): {field}={text!r} is empty, and no actor has such a {field}",
                field=field,
            )
    from stoker.runtime.actors.create import handle_of
    from stoker_wire.messages.control import Page
    from stoker_wire.messages.work import Actor, ActorState

    runtime = current.runtime()
    if runtime.inline is not None and (found := runtime.inline.find(name, namespace)) is not None:
        return found
    where = namespace or runtime.job.namespace
    query = {"name": name, "namespace": where, "limit": 100}
    page = runtime.io.run(
        runtime.clients.gcs.call("GET", "/v1/actors", reply=Page[Actor], query=query), _CALL_S
    )
    living = [a for a in page.items if a.state is not ActorState.DEAD]
    if not living:
        raise NotFoundError(
            f"no living actor is named {name!r} in namespace {where!r}\n"
            "was it created with name=..., in this namespace, and is its job (or "
            "lifetime='detached') still there?",
            field="name",
        )
    return handle_of(living[0])


def is_initialized() -> bool:
    """Return whether this process is connected to a cluster."""
    return current.maybe_runtime() is not None


def get_runtime_context() -> RuntimeContext:
    """Return where the calling code runs: job, node, worker, task, actor, GPUs."""
    runtime = current.runtime()
    info = current_task.get()
    lease, actor = runtime.job.lease, runtime.job.actor
    traceparent, tracestate = split(TRACES.now())
    return RuntimeContext(
        job_id=runtime.job.job_id,
        node_id=runtime.identity.node.node_id if runtime.identity.node else "",
        worker_id=runtime.identity.peer_id,
        task_id=info.task_id if info else "",
        task_name=info.name if info else "",
        attempt=info.attempt if info else 0,
        actor_id=lease.actor_id if lease else info.actor_id if info else "",
        gcs_url=runtime.identity.gcs_url,
        gpu_ids=tuple(sorted(lease.gpus)) if lease else (),
        assigned_resources=dict(lease.resources) if lease else {},
        was_current_actor_reconstructed=actor is not None and bool(actor.incarnation),
        traceparent=traceparent,
        tracestate=tracestate,
    )


def get_gpu_ids() -> list[int]:
    """Return the device indices that this worker may use, as the node counts them."""
    return list(get_runtime_context().gpu_ids)


def nodes() -> list[dict[str, Any]]:
    """Return the cluster's nodes, living and dead, as the HTTP API shows them."""
    return shown_records("Nodes", _NODE_FIELDS, list_all("/v1/nodes"))


def list_all(path: str, **filters: str) -> list[dict[str, Any]]:
    """Return all items of a list of the HTTP API."""
    runtime = current.runtime()
    items: list[dict[str, Any]] = []
    cursor = ""
    while True:
        query = {**filters, "limit": 1000, "cursor": cursor or None}
        page = runtime.job.http.call("GET", path, reply=dict[str, Any], query=query)
        items += page["items"]
        cursor = page.get("next_cursor", "")
        if not cursor:
            return items


def cluster_resources() -> dict[str, float]:
    """Return the sum of all nodes' resources (memory in bytes)."""
    return _cluster("total")


def available_resources() -> dict[str, float]:
    """Return what no lease holds at the moment."""
    return _cluster("available")


def _cluster(field: str) -> dict[str, float]:
    from stoker_wire.messages.cluster import ClusterResources

    reply = current.runtime().job.http.call("GET", "/v1/cluster", reply=ClusterResources)
    return dict(getattr(reply, field))


def timeline(filename: str | None = None) -> list[dict[str, Any]]:
    """Return what ran of this job as Chrome trace events; write them to ``filename``.

    Open the file in Perfetto or ``chrome://tracing``. Of attempts the newest 100,000 are read; the command
    line reads more, of all jobs, without holding them in memory (``stoker timeline``).
    """
    import msgspec

    from stoker.api.tracing.reading import TimelineReader

    runtime = current.runtime()
    runtime.io.run(runtime.forward_history(), _CALL_S)
    reader = TimelineReader(runtime.job.http, runtime.job.job_id, limit=_TIMELINE_ATTEMPTS)
    events = list(reader.events())
    if filename:
        with open(filename, "wb") as file:
            file.write(msgspec.json.encode(events))
    return events
