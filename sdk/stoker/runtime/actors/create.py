"""Creation of actors: the constructor's call is packed here; the gcs keeps it, and places the actor.

The gcs knows an actor from the start, even while its arguments are not there, so that its name is taken
and it ends with its owner.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from stoker.exceptions import ActorDiedError, StokerError
from stoker.runtime.actors.handle import ActorHandle
from stoker.runtime.actors.info import (
    SAVE,
    ActorPayload,
    HandleInfo,
    checked_groups,
    methods_of,
    unordered_groups,
)
from stoker.runtime.actors.published import decoded_info, encoded_info
from stoker.runtime.options.demands import demand_of
from stoker.runtime.options.options import TaskOptions
from stoker.runtime.process.cells import CELLS
from stoker.runtime.process.current_task import current_task_id
from stoker.runtime.process.tracing.context import TRACES
from stoker.runtime.tasks.functions import INLINE_NBYTES, pickled
from stoker.runtime.tasks.task_spec import (
    FunctionSpec,
    PendingTask,
    failed_argument,
    pack_arguments,
    unready_argument,
    wire_call,
)
from stoker_wire.data.frames import FrameCodec
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.cluster import LeaseKind
from stoker_wire.messages.data import Run, Stored, Template
from stoker_wire.messages.work import Actor, CreateActor, KillActor, SupplyArguments

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stoker.runtime.actors.calls import ActorCalls
    from stoker.runtime.actors.connection import ActorConnection, ActorConnector
    from stoker.runtime.job import JobContext
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.options.actor_options import ActorOptions
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.messages.common import Address

T = TypeVar("T")

_CREATE_S = 60.0
_TRY_S = 5.0
"""The deadline of the first try of a request that is repeated; each has twice the one before."""
_AGAIN_S = 0.5


class ActorCreator:
    """The part that creates this process's actors."""

    def __init__(
        self,
        address: Address,
        io: IoThread,
        clients: ClusterClients,
        job: JobContext,
        objects: ObjectStore,
        actors: ActorCalls,
    ) -> None:
        self._address = address
        self._io = io
        self._clients = clients
        self._job = job
        self._objects = objects
        self._actors = actors

    def create(
        self,
        cls: type,
        options: ActorOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> ActorHandle[Any]:
        """Return a handle to a new actor.

        A named one is created before this returns, others while the caller goes on.
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
            self._job.job_id,
            unordered_groups(cls, options, groups),
        )
        demand = demand_of(
            options,
            job_id=self._job.job_id,
            kind=LeaseKind.ACTOR,
            runtime_env=self._job.runtime_env_of(options.runtime_env),
            strategy=self._job.strategy_of(options.scheduling_strategy),
            default_cpus=0.0,
            name=options.name or name,
        )
        blob, digest, refs = pickled(cls, what=f"class {name}")
        spec = FunctionSpec(
            submitter=self._actors,
            function=digest,
            blob=blob,
            name=name,
            template=Template(number=0, function=digest, name=name, cell=CELLS.now()),
            options=TaskOptions(),
            demand=demand,
            actor_id=actor_id,
            refs=refs,
        )
        location, deps, nested = pack_arguments(
            self._objects.values, self._address, new_id(Prefix.TASK), spec, args, kwargs
        )
        if isinstance(location, Stored):
            arguments = self._objects.new_ref(location.object_id)  # freed with the call
            arguments._entry.location = location
            nested = (*nested, arguments)
        call = PendingTask(new_id(Prefix.TASK), spec, location, deps, nested, current_task_id())
        if TRACES.of_caller is not None:
            call.trace = TRACES.of_caller()
        creation = _Creation(
            self._clients,
            self._objects,
            self._actors.connector,
            self._address,
            self._actors.connection_to(info),
            call,
            CreateActor(
                actor_id=actor_id,
                demand=demand,
                class_name=name,
                payload=b"",
                owner=self._job.owner(),
                name=options.name or "",
                namespace=options.namespace or self._job.namespace,
                detached=options.lifetime == "detached",
                get_if_exists=options.get_if_exists,
                max_restarts=options.max_restarts,
                max_oom_restarts=options.max_oom_restarts,
                restart_delay_s=options.restart_delay,
                max_task_retries=options.max_task_retries,
                handle_info=encoded_info(info),
                saves_state=callable(getattr(cls, SAVE, None)),
            ),
            options,
            groups,
        )
        connection = creation.connection
        connection.owned = options.lifetime != "detached"
        connection.constructor_call = call  # a restart needs the arguments again
        if not options.name:
            self._io.call_soon(self._actors.begin_creation, connection, creation.run())
            return ActorHandle(
                info, self._actors.new_handle_mark(actor_id) if connection.owned else None
            )
        actor = None
        try:
            actor = self._io.run(creation.register(), _CREATE_S)
        finally:
            if actor is None or actor.actor_id != actor_id:  # the name is taken
                connection.owned, connection.constructor_call = False, None
        if actor.actor_id != actor_id:
            return handle_of(actor)
        if actor.awaits_arguments:
            self._io.call_soon(self._actors.begin_creation, connection, creation.supply_arguments())
        return ActorHandle(info)


class _Creation:
    """The creation of one actor: known to the gcs at once, placed once its arguments are there."""

    def __init__(
        self,
        clients: ClusterClients,
        objects: ObjectStore,
        connector: ActorConnector,
        address: Address,
        connection: ActorConnection,
        call: PendingTask,
        request: CreateActor,
        options: ActorOptions,
        groups: dict[str, int],
    ) -> None:
        self.connection = connection
        self._clients = clients
        self._objects = objects
        self._connector = connector
        self._address = address
        self._call = call
        self._request = request
        self._options = options
        self._groups = groups

    async def run(self) -> None:
        """Register the actor, and supply its arguments as soon as they are there."""
        actor = await self._patiently(self.register)
        if actor.awaits_arguments:
            await self.supply_arguments()

    async def _patiently(self, request: Callable[[float], Awaitable[T]]) -> T:
        """Repeat an idempotent request until the gcs answers; meanwhile the actor's calls say so."""
        timeout_s = _TRY_S
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._connector.watch.start()
                return await request(timeout_s)
            except StokerError as error:
                if not error.retryable:
                    raise
                why = error.one_line
            except TimeoutError:
                why = f"no events came within {timeout_s:g} s"
            self.connection.status_text = f"the gcs does not answer: {why}"
            await asyncio.sleep(_AGAIN_S)
            timeout_s = min(2 * timeout_s, _CREATE_S)

    async def register(self, timeout_s: float = _CREATE_S) -> Actor:
        """Register the actor in the gcs, durably; with its arguments if they are there.

        Also if one has failed: its handle may be anywhere, and all must learn the cause.
        """
        request = replace(self._request, awaits_arguments=True)
        if unready_argument(self._call) is None and failed_argument(self._call) is None:
            request = replace(self._request, payload=self._payload())
        await self._connector.watch.start()  # then no event of it can be missed
        async with self._connector.request_slots:
            if not self._inline_class:
                spec = self._call.spec
                await self._clients.store_function(spec.function, spec.blob)
            actor = await self._clients.gcs.call(
                "POST", "/v1/actors", request, reply=Actor, timeout_s=timeout_s
            )
        if actor.actor_id == self.connection.actor_id:
            self.connection.update(actor)
            self.connection.registered.set()
        return actor

    async def supply_arguments(self) -> None:
        """Give the gcs the arguments once they are there, or the reason why they never will be."""
        await self._objects.all_settled([d._entry for d in self._call.deps])
        path = f"/v1/actors/{self.connection.actor_id}"
        try:
            self._check_arguments()
        except ActorDiedError as error:
            await self._patiently(self._poster(f"{path}/kill", KillActor(reason=error.message)))
            raise
        body = SupplyArguments(payload=self._payload())
        await self._patiently(self._poster(f"{path}/arguments", body))

    def _poster(self, path: str, body: KillActor | SupplyArguments) -> Callable[[float], Any]:
        async def post(timeout_s: float) -> None:
            async with self._connector.request_slots:
                await self._clients.gcs.call("POST", path, body, timeout_s=timeout_s)

        return post

    def _check_arguments(self) -> None:
        failed = failed_argument(self._call)
        if failed is not None:
            self.connection.mark_dead(failed)
            raise ActorDiedError(
                f"an argument of actor {self.connection.name} failed\n{failed.message}"
            )

    @property
    def _inline_class(self) -> bytes:
        blob = self._call.spec.blob
        return blob if len(blob) <= INLINE_NBYTES else b""

    def _payload(self) -> bytes:
        run = Run([wire_call(self._call, self._address)], [self._call.spec.template])
        frame = FrameCodec().encode([run])
        concurrency = self._options.max_concurrency
        return msgspec.msgpack.encode(
            ActorPayload(
                frame, concurrency, self._groups, self._inline_class, self._options.save_interval_s
            )
        )


def handle_of(actor: Actor) -> ActorHandle[Any]:
    """Return a handle to an actor that the gcs knows."""
    return ActorHandle(decoded_info(actor))
