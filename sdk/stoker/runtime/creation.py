"""Starting actors: packs the constructor's call and has the gcs keep and place it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cloudpickle
import msgspec

from stoker._actors import ActorHandle, HandleInfo, checked_groups, methods_of, unordered_groups
from stoker._options import ActorOptions, TaskOptions, demand_of
from stoker._remote import pickled
from stoker.exceptions import ActorDiedError, StokerError
from stoker.runtime.calls import FunctionSpec, PendingTask, call_of, failed_dep, pack_arguments
from stoker.runtime.failures import failed_with
from stoker.runtime.invocation import ActorPayload
from stoker_wire.frames import FrameCodec
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.cluster import LeaseKind
from stoker_wire.messages.data import Run, Stored, Template
from stoker_wire.messages.work import Actor, CreateActor

if TYPE_CHECKING:
    from stoker.runtime.actor_link import ActorLink
    from stoker.runtime.runtime import Runtime

_CREATE_S = 60.0
_CARRIED_NBYTES = 8 << 10
"""A pickled class up to this size goes with the actor; its worker asks the gcs for larger ones."""


def create_actor(
    runtime: Runtime,
    cls: type,
    options: ActorOptions,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ActorHandle[Any]:
    """Return a handle to a new actor. Named ones are made before this returns, others while the
    caller goes on.
    """
    actor_id = new_id(Prefix.ACTOR)
    name = cls.__qualname__
    groups = checked_groups(cls, options)
    info = HandleInfo(
        actor_id,
        name,
        methods_of(cls),
        options.max_task_retries,
        options.max_pending_calls,
        tuple(groups),
        runtime.job_id,
        unordered_groups(cls, options, groups),
    )
    demand = demand_of(
        options,
        job_id=runtime.job_id,
        kind=LeaseKind.ACTOR,
        runtime_env=runtime.runtime_env_of(options.runtime_env),
        default_cpus=0.0,
        name=options.name or name,
    )
    blob, digest, refs = pickled(cls, what=f"class {name}")
    spec = FunctionSpec(
        function=digest,
        blob=blob,
        name=name,
        template=Template(number=0, function=digest, name=name),
        options=TaskOptions(),
        demand=demand,
        actor_id=actor_id,
        refs=refs,
    )
    place, deps, nested = pack_arguments(runtime, new_id(Prefix.TASK), spec, args, kwargs)
    if isinstance(place, Stored):
        arguments = runtime.objects.new_ref(place.object_id)  # they go when the call goes
        arguments._entry.place = place
        nested = (*nested, arguments)
    call = PendingTask(new_id(Prefix.TASK), spec, place, deps, nested, runtime.current_task_id())
    request = CreateActor(
        actor_id=actor_id,
        demand=demand,
        class_name=name,
        payload=b"",
        owner_id=runtime.address.peer_id,
        name=options.name or "",
        namespace=options.namespace or runtime.namespace,
        detached=options.lifetime == "detached",
        get_if_exists=options.get_if_exists,
        max_restarts=options.max_restarts,
        max_task_retries=options.max_task_retries,
        handle_info=cloudpickle.dumps(info, 5),
    )
    link = runtime.actors.link(info)
    link.owned = options.lifetime != "detached"
    link.held = call  # a restart needs the arguments again
    work = _create(runtime, link, call, request, options, groups)
    if not options.name:
        runtime.call_soon(runtime.actors.begin_creation, link, work)
        return ActorHandle(info, owns=options.lifetime != "detached")
    actor = runtime.run(work, _CREATE_S)
    assert actor is not None
    if actor.actor_id != actor_id:  # there was one of that name already
        link.owned = False
        return handle_of(actor)
    return ActorHandle(info)


async def _create(
    runtime: Runtime,
    link: ActorLink,
    call: PendingTask,
    request: CreateActor,
    options: ActorOptions,
    groups: dict[str, int],
) -> Actor:
    await runtime.objects.all_settled([d._entry for d in call.deps])
    failed = failed_dep(call)
    if failed is not None:
        link.die(failed)
        raise ActorDiedError(f"an argument of actor {link.name} failed: {failed.message}")
    frame = FrameCodec().encode([Run([call_of(call, runtime.address)], [call.spec.template])])
    blob = call.spec.blob if len(call.spec.blob) <= _CARRIED_NBYTES else b""
    payload = ActorPayload(frame, options.max_concurrency, groups, blob)
    lines = runtime.actors.lines
    await lines.news.begin()  # what happens to it next is told, and need not be asked
    async with lines.gate:
        if not blob:
            await runtime.services.store_function(call.spec.function, call.spec.blob)
        actor = await runtime.gcs.call(
            "POST",
            "/v1/actors",
            msgspec.structs.replace(request, payload=msgspec.msgpack.encode(payload)),
            reply=Actor,
            timeout_s=_CREATE_S,
        )
    if actor.actor_id == link.actor_id:
        link.hear(actor)
    return actor


def handle_of(actor: Actor) -> ActorHandle[Any]:
    """Return a handle to an actor that the gcs knows."""
    info: HandleInfo = cloudpickle.loads(actor.handle_info)
    return ActorHandle(info)


def creation_failed(link: ActorLink, error: StokerError) -> None:
    """Note that an actor could not be created: its calls fail with the cause."""
    if link.dead is None:
        text = f"actor {link.name} could not be created: {error.message}"
        link.die(failed_with(ActorDiedError(text)))
