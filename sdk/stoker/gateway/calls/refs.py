"""The objects that one token holds by reference: until their time is over, they are freed, or it ends."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from stoker.exceptions import (
    BadRequestError,
    NotFoundError,
    PayloadTooLargeError,
    PendingCallsLimitError,
    StokerError,
)
from stoker.runtime.serialization.exceptions import error_info
from stoker.runtime.worker.json_calls import FIELD
from stoker_wire.http.codec import BYTES, JSON
from stoker_wire.http.gateway.calls import HeldRef, RefState
from stoker_wire.messages.data import Failed, Stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.runtime.objects.refs import ObjectRef
    from stoker.runtime.runtime import Runtime
    from stoker.runtime.worker.json_calls import JsonResult

MAX_REFS = 10_000
"""References of one token."""
MAX_PUT_NBYTES = 1 << 30
"""Bytes that one token may have put."""
TTL_S = 3600.0
"""The time of what is given none."""
_SWEEP_S = 1.0


class Held:
    """One object; its time begins once its value is there."""

    def __init__(self, ref: ObjectRef[Any], name: str, ttl_s: float) -> None:
        self.ref = ref
        self.name = name
        self.ttl_s = ttl_s
        self.created_at_s = time.time()
        self.settled_at_s: float | None = None
        self.is_json: bool | None = None
        """Whether it is JSON, once that is known."""
        self.put_nbytes = 0

    @property
    def expires_at_s(self) -> float | None:
        """Time at which it is dropped; None while its value is being made."""
        return None if self.settled_at_s is None else self.settled_at_s + self.ttl_s

    def record(self) -> HeldRef:
        """Return it as it is shown."""
        location = self.ref._entry.location
        state, error, nbytes = RefState.READY, None, self.put_nbytes
        if location is None:
            state = RefState.PENDING
        elif isinstance(location, Failed):
            state, error = RefState.FAILED, error_info(location)
        elif isinstance(location, Stored):
            nbytes = nbytes or location.nbytes
        else:
            nbytes = nbytes or len(location.data)
        media_type = "" if self.is_json is None else JSON if self.is_json else BYTES
        return HeldRef(
            ref=self.ref.id,
            state=state,
            task_id=self.ref.task_id,
            name=self.name,
            media_type=media_type,
            nbytes=nbytes,
            error=error,
            created_at_s=self.created_at_s,
            expires_at_s=self.expires_at_s,
        )


class RefTable:
    """The references of one caller (loop thread)."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._held: dict[str, Held] = {}
        self.put_nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def check_room(self, nbytes: int = 0) -> None:
        """Raise if no more references, or no more bytes, may be held."""
        if len(self._held) >= MAX_REFS:
            raise PendingCallsLimitError(
                f"this token holds {MAX_REFS} references\n"
                "free some (DELETE /v1/refs/{ref}), or give a shorter ttl_s",
                field="refs",
            )
        if self.put_nbytes + nbytes > MAX_PUT_NBYTES:
            raise PayloadTooLargeError(
                f"this token has put {self.put_nbytes} bytes, and these {nbytes} are more than "
                f"{MAX_PUT_NBYTES}\nfree some (DELETE /v1/refs/{{ref}})",
                field="body",
            )

    def hold(self, ref: ObjectRef[Any], name: str, ttl_s: float | None) -> Held:
        """Hold an object until it was there for ``ttl_s``."""
        held = Held(ref, name, TTL_S if ttl_s is None else ttl_s)
        self._held[ref.id] = held

        def settled() -> None:
            held.settled_at_s = time.time()

        self._runtime.objects.when_settled(ref._entry, settled)
        return held

    async def put(self, data: bytes, *, is_json: bool, ttl_s: float | None) -> Held:
        """Store a value and hold it."""
        self.check_room(len(data))
        self.put_nbytes += len(data)
        try:
            ref = await asyncio.to_thread(self._runtime.objects.put, (is_json, data))
        except BaseException:
            self.put_nbytes -= len(data)
            raise
        held = self.hold(ref, "", ttl_s)
        held.is_json, held.put_nbytes = is_json, len(data)
        return held

    def find(self, ref: str, field: str = "ref") -> Held:
        """Return a reference; NotFoundError if it is not held."""
        held = self._held.get(ref)
        if held is None:
            raise NotFoundError(
                f"{field}: {ref[:100]!r} is not held by this token\n"
                "it was freed, its ttl_s is over, or another token made it",
                field=field,
            )
        return held

    def find_task(self, task_id: str) -> Held:
        """Return the reference to the result of a task; NotFoundError if it is not held."""
        for held in self._held.values():
            if held.ref.task_id == task_id:
                return held
        raise NotFoundError(
            f"task_id: {task_id[:100]!r} is no task of a call that this token has made and still holds\n"
            "tasks of other programs end with their job (POST /v1/jobs/{job_id}/stop) or actor",
            field="task_id",
        )

    def free(self, ref: str) -> None:
        """Hold it no more; a call that is not finished is cancelled."""
        held = self.find(ref)
        del self._held[ref]
        self.put_nbytes -= held.put_nbytes
        if held.settled_at_s is None and held.ref.task_id:
            self._runtime.pending.cancel(held.ref.task_id, force=False, recursive=True)

    async def settled(self, refs: list[ObjectRef[Any]], count: int = 1) -> None:
        """Wait until ``count`` of some objects are there, or have failed."""
        done = asyncio.get_running_loop().create_future()
        missing = count

        def one() -> None:
            nonlocal missing
            missing -= 1
            if missing <= 0 and not done.done():
                done.set_result(None)

        for ref in refs:
            self._runtime.objects.when_settled(ref._entry, one)
        await done

    async def value(self, ref: ObjectRef[Any], timeout_s: float | None = None) -> JsonResult:
        """Return a value that is there, or raise its error; none of its code is run."""
        entry, load = ref._entry, self._runtime.objects.load
        try:
            if isinstance(entry.location, Stored):
                found = await asyncio.to_thread(load, entry, timeout_s, (), True)
            else:
                found = load(entry, timeout_s, (), True)
        except StokerError as error:
            error.field = error.field or error.extra.pop(FIELD, None)
            raise
        match found:
            case (bool() as is_json, bytes() as data):
                return is_json, data
        raise BadRequestError(f"{ref.id} is no value of a call by HTTP", field="ref")

    async def sweep(self) -> None:
        """Drop what has had its time, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now_s = time.time()
            for held in list(self._held.values()):
                if (end_s := held.expires_at_s) is not None and end_s < now_s:
                    self.free(held.ref.id)
