"""A caller: it calls functions and actors for the bearers of one token, and holds objects for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.exceptions import BadRequestError, DeadlineExceededError
from stoker.gateway.calls.refs import Held, RefTable
from stoker.gateway.calls.targets import Targets
from stoker.runtime.worker.json_calls import JsonRequest, encode_request
from stoker_wire.http.gateway.calls import CALL_S, REF

if TYPE_CHECKING:
    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.runtime import Runtime
    from stoker.runtime.worker.json_calls import JsonResult
    from stoker_wire.http.gateway.calls import CallRequest, CancelCall, HeldRef
    from stoker_wire.http.principals import Principal

_NULL = msgspec.Raw(b"null")
_MARK = f'"{REF}"'.encode()
_MARK_WITHIN = 32
"""Where the mark of a reference is, if an argument is one."""


class Caller:
    """The owner of the routes. All of it is on the runtime's loop thread, so a call changes no thread."""

    def __init__(self, runtime: Runtime, principal: Principal, namespace: str) -> None:
        self._runtime = runtime
        self.refs = RefTable(runtime)
        self.targets = Targets(runtime, principal, namespace)

    # -- calls -----------------------------------------------------------------------------------

    async def call(self, body: CallRequest) -> JsonResult:
        """Make a call and return its result, or raise its error; cancel it at its deadline."""
        name, ref = await self._submit(body)
        timeout_s = CALL_S if body.timeout_s is None else body.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self.refs.settled([ref])
        except TimeoutError:
            why = self.why(ref)
            self._runtime.pending.cancel(ref.task_id, force=False, recursive=True)
            raise DeadlineExceededError(
                f"{name} ({ref.task_id}) did not end within timeout_s={timeout_s:g}, and was cancelled\n"
                f"{why}",
                field="timeout_s",
            ) from None
        except asyncio.CancelledError:
            self._runtime.pending.cancel(ref.task_id, force=False, recursive=True)
            raise
        return await self.refs.value(ref)

    async def begin(self, body: CallRequest) -> HeldRef:
        """Make a call and hold its result by reference."""
        self.refs.check_room()
        name, ref = await self._submit(body)
        held = self.refs.hold(ref, name, body.ttl_s)
        if body.timeout_s is not None:
            asyncio.get_running_loop().call_later(body.timeout_s, self._end, held)
        return held.record()

    def _end(self, held: Held) -> None:
        if held.settled_at_s is None:
            self._runtime.pending.cancel(held.ref.task_id, force=False, recursive=True)

    async def _submit(self, body: CallRequest) -> tuple[str, ObjectRef[Any]]:
        target = await self.targets.find(body)
        refs: list[ObjectRef[Any]] = []
        where: list[int | str] = []
        args, kwargs = list(body.args), dict(body.kwargs)
        for index, raw in enumerate(args):
            if (ref := self._ref_in(raw, f"args.{index}")) is not None:
                refs.append(ref)
                where.append(index)
                args[index] = _NULL
        for name, raw in kwargs.items():
            if (ref := self._ref_in(raw, f"kwargs.{name}")) is not None:
                refs.append(ref)
                where.append(name)
                kwargs[name] = _NULL
        request = encode_request(JsonRequest(tuple(args), kwargs, tuple(where)))
        return target.name, target.submit((request, *refs))

    def _ref_in(self, raw: msgspec.Raw, field: str) -> ObjectRef[Any] | None:
        """Return the reference that an argument is, if it is one."""
        data = bytes(raw)
        if _MARK not in data[:_MARK_WITHIN] or not data.startswith(b"{"):
            return None
        value = msgspec.json.decode(data)
        if set(value) != {REF}:
            return None
        if not isinstance(value[REF], str):
            raise BadRequestError(f"{field}: {REF} is no reference", field=field)
        return self.refs.find(value[REF], field).ref

    # -- references ------------------------------------------------------------------------------

    async def put(self, data: bytes, *, is_json: bool, ttl_s: float | None) -> HeldRef:
        """Hold a value that is given."""
        if is_json:
            try:
                msgspec.json.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise BadRequestError(
                    f"the body is not JSON\n{error}\n"
                    "send bytes with Content-Type: application/octet-stream",
                    field="body",
                ) from None
        return (await self.refs.put(data, is_json=is_json, ttl_s=ttl_s)).record()

    async def wait(self, refs: list[Held], count: int, wait_s: float) -> bool:
        """Wait until ``count`` are there or have failed; return False if the time passed first."""
        missing = [held.ref for held in refs if held.ref._entry.location is None]
        count -= len(refs) - len(missing)
        if count <= 0:
            return True
        try:
            async with asyncio.timeout(wait_s):
                await self.refs.settled(missing, count)
        except TimeoutError:
            return False
        return True

    def cancel(self, body: CancelCall) -> HeldRef:
        """Stop a call; return its reference, which fails unless it has ended already."""
        if bool(body.ref) == bool(body.task_id):
            raise BadRequestError("ref: give a ref or a task_id, one of both", field="ref")
        refs = self.refs
        held = refs.find(body.ref) if body.ref else refs.find_task(body.task_id)
        task_id = held.ref.task_id
        if not task_id:
            raise BadRequestError(f"ref: {held.ref.id} was put, no call makes it", field="ref")
        if body.force and self._runtime.actors.has_call(task_id):
            raise BadRequestError(
                "force: its process is not that call's alone\n"
                "cancel it without force, or kill the actor (POST /v1/actors/{actor_id}/kill)",
                field="force",
            )
        self._runtime.pending.cancel(task_id, force=body.force, recursive=body.recursive)
        return held.record()

    def why(self, ref: ObjectRef[Any]) -> str:
        """Return what a call waits for, in words."""
        task = ref._entry.task
        return "" if task is None else task.describe()
