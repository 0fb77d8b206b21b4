"""The targets of calls: registered functions and methods of actors, as the gcs has them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote

from msgspec.structs import replace

from stoker.api import registered
from stoker.exceptions import BadRequestError, ForbiddenError, NotFoundError
from stoker.runtime.actors.create import handle_of
from stoker.runtime.actors.handle import ActorMethod
from stoker.runtime.actors.info import SYSTEM_METHODS
from stoker.runtime.worker.json_calls import call_method
from stoker_wire.http.gateway.calls import FUNCTION_PREFIX, RegisteredFunction
from stoker_wire.ids import Prefix, is_id
from stoker_wire.messages.control import KvEntry, KvGet, KvReply, Page
from stoker_wire.messages.work import Actor, ActorState
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.runtime import Runtime
    from stoker_wire.http.gateway.calls import CallRequest
    from stoker_wire.http.principals import Principal

FRESH_S = 1.0
"""What the gcs said of a name is not older when it is used."""
_REMEMBERED = 1000
_CALL_S = 15.0
_PER_READ = 100
_PAGE = 1000
_CALL = "__stoker_call__"


class Target(NamedTuple):
    """A thing to call: ``submit(args)`` sends a call whose first argument is a JSON request."""

    name: str
    submit: Callable[[tuple[Any, ...]], ObjectRef[Any]]


class Targets:
    """The functions and actors that the callers of one token name (loop thread)."""

    def __init__(self, runtime: Runtime, principal: Principal, namespace: str) -> None:
        self._runtime = runtime
        self._principal = principal
        self._namespace = namespace
        self._known: dict[tuple[str, ...], tuple[Target, float]] = {}
        self._functions: dict[tuple[str, str, str], Target] = {}
        """By the namespace, the key and the hash of what is registered there: leases go by the spec."""

    async def find(self, body: CallRequest) -> Target:
        """Return what a call names; NotFoundError and BadRequestError say which field is wrong."""
        _check_fields(body)
        namespace = self._namespace_of(body.namespace)
        key = namespace, body.function, body.version, body.actor, body.method
        target, found_s = self._known.get(key, (None, 0.0))
        if target is None or time.monotonic() - found_s > FRESH_S:
            if body.function:
                target = await self._function(namespace, body.function, body.version)
            else:
                target = await self._method(namespace, body)
            while len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = target, time.monotonic()
        return target

    def _namespace_of(self, given: str | None) -> str:
        namespace = self._namespace if given is None else given
        if not self._principal.may_use(namespace):
            raise ForbiddenError(
                f"namespace: {namespace!r} is not for {self._principal}\n"
                f"its token is for {', '.join(self._principal.namespaces)}",
                field="namespace",
            )
        return namespace

    # -- functions -------------------------------------------------------------------------------

    async def _function(self, namespace: str, name: str, version: str) -> Target:
        if version:
            key = registered.key_of(name, version)
        else:
            entries = await self._entries(namespace, registered.versions_of(name))
            if not entries:
                raise await self._unknown(namespace, name, version)
            key = max(entries, key=lambda one: one.revision).key
        for raw in await self._read(namespace, (key,)):
            registration = registered.decode(raw, key)
            known = namespace, key, registration.function
            target = self._functions.get(known)
            if target is None:
                target = self._functions[known] = self._target_of(registration)
            return target
        raise await self._unknown(namespace, name, version)

    def _target_of(self, registration: registered.Registration) -> Target:
        tasks = self._runtime.tasks
        spec = registration.spec(tasks, self._runtime.job.job_id)

        def submit(args: tuple[Any, ...]) -> ObjectRef[Any]:
            return tasks.submit(spec, args, {})  # type: ignore[no-any-return]

        return Target(registration.name, submit)

    async def _unknown(self, namespace: str, name: str, version: str) -> NotFoundError:
        keys = [one.key for one in await self._entries(namespace, FUNCTION_PREFIX)]
        pairs = [key.removeprefix(FUNCTION_PREFIX).split("/") for key in keys]
        versions = [unquote(known[1]) for known in pairs if unquote(known[0]) == name]
        if versions:
            return NotFoundError(
                f"version: no version {version!r} of {name!r} is registered in namespace "
                f"{namespace!r}\n{suggestion(version, versions)}",
                field="version",
            )
        names = {unquote(known[0]) for known in pairs}
        return NotFoundError(
            f"function: no {name!r} is registered in namespace {namespace!r}\n"
            f"{suggestion(name, names) if names else 'stoker.register(function) makes one known'}",
            field="function",
        )

    async def functions(self, namespace: str | None, name: str) -> tuple[RegisteredFunction, ...]:
        """Return the registered functions of a namespace, all or all versions of one."""
        where = self._namespace_of(namespace)
        prefix = registered.versions_of(name) if name else FUNCTION_PREFIX
        keys = [one.key for one in await self._entries(where, prefix)]
        shown = []
        for first in range(0, len(keys), _PER_READ):
            for raw in await self._read(where, tuple(keys[first : first + _PER_READ])):
                one = registered.decode(raw, prefix)
                shown.append(
                    RegisteredFunction(
                        name=one.name,
                        version=one.version,
                        namespace=where,
                        signature=one.signature,
                        doc=one.doc,
                    )
                )
        return tuple(shown)

    async def _entries(self, namespace: str, prefix: str) -> list[KvEntry]:
        gcs, path = self._runtime.clients.gcs, f"/v1/kv/{quote(namespace, safe='')}"
        entries: list[KvEntry] = []
        cursor = ""
        while True:
            query = {"prefix": prefix, "limit": _PAGE, "cursor": cursor or None}
            page = await gcs.call("GET", path, reply=Page[KvEntry], query=query, timeout_s=_CALL_S)
            entries += page.items
            cursor = page.next_cursor
            if not cursor:
                return entries

    async def _read(self, namespace: str, keys: tuple[str, ...]) -> list[bytes]:
        gcs, path = self._runtime.clients.gcs, f"/v1/kv/{quote(namespace, safe='')}"
        body = KvGet(keys=keys)
        reply = await gcs.call("POST", path, body, reply=KvReply, timeout_s=_CALL_S)
        return [one.value for one in reply.items]

    # -- methods of actors -----------------------------------------------------------------------

    async def _method(self, namespace: str, body: CallRequest) -> Target:
        actor = await self._actor(namespace, body.actor)
        handle = handle_of(actor)
        info = handle._info.methods.get(body.method)
        if info is None or body.method.startswith("_"):
            public = [name for name in handle._info.methods if not name.startswith("_")]
            raise NotFoundError(
                f"method: actor {body.actor!r} has no method {body.method!r}\n"
                f"{suggestion(body.method, public)}",
                field="method",
            )
        name = f"{handle._info.class_name}.{body.method}"
        options = replace(info.options, name=name, num_returns=1)
        call = SYSTEM_METHODS[_CALL]._replace(options=options)
        method = ActorMethod(handle, _CALL, call, {})

        def submit(args: tuple[Any, ...]) -> ObjectRef[Any]:
            return method.remote(call_method, body.method, *args)

        return Target(name, submit)

    async def _actor(self, namespace: str, name: str) -> Actor:
        gcs = self._runtime.clients.gcs
        if is_id(name, Prefix.ACTOR):
            try:
                return await gcs.call("GET", f"/v1/actors/{name}", reply=Actor, timeout_s=_CALL_S)
            except NotFoundError:
                raise NotFoundError(f"actor: there is no actor {name}", field="actor") from None
        query = {"name": name, "namespace": namespace, "limit": 100}
        page = await gcs.call(
            "GET", "/v1/actors", reply=Page[Actor], query=query, timeout_s=_CALL_S
        )
        for actor in page.items:
            if actor.state is not ActorState.DEAD:
                return actor
        raise NotFoundError(
            f"actor: no living actor is named {name!r} in namespace {namespace!r}\n"
            "give the namespace of the job that created it, or its id",
            field="actor",
        )


def _check_fields(body: CallRequest) -> None:
    if bool(body.function) == bool(body.actor):
        raise BadRequestError(
            "function: give the name of a registered function, or an actor and a method",
            field="function",
        )
    if body.actor and not body.method:
        raise BadRequestError("method: give the name of the actor's method", field="method")
    if body.actor and body.version:
        raise BadRequestError("version: an actor has none", field="version")
    if body.function and body.method:
        raise BadRequestError("method: a function has none, an actor has", field="method")
