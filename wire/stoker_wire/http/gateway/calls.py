"""Calls from outside by HTTP, and the objects that their callers hold by reference."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.ids import Prefix
from stoker_wire.messages.common import (
    MAX_SECONDS,
    ErrorInfo,
    Message,
    Name,
    ObjectId,
    PositiveSeconds,
    Record,
    Seconds,
    id_rule,
    stated,
)

CALLS_PATH = "/v1/calls"
REFS_PATH = "/v1/refs"
MAX_ARGUMENTS = 10_000
"""Arguments of one call, and refs of one wait."""
CALL_S = 60.0
"""The deadline of a call that names none, and whose answer is waited for."""
WAIT_S = 20.0
REF = "$ref"
"""The one member of the object that stands for a value held by reference: ``{"$ref": "o_..."}``."""
FUNCTION_PREFIX = "stoker.functions/"
"""Before the names of registered functions among the keys of their namespace."""

Deadline = Annotated[PositiveSeconds, msgspec.Meta(description="seconds")]
TaskId = Annotated[str, id_rule(Prefix.TASK)]


def is_call(path: str) -> bool:
    """Return whether a path is one of the routes of calls."""
    return path in (CALLS_PATH, REFS_PATH) or path.startswith((f"{CALLS_PATH}/", f"{REFS_PATH}/"))


class CallRequest(Message):
    """A call of a registered ``function``, or of a ``method`` of an ``actor`` by its name or id.

    It is cancelled after ``timeout_s`` seconds: 60 unless given, or none with ``async``.

    Arguments are JSON; ``{"$ref": "o_..."}`` as a whole argument is the value held by that reference. With
    ``async`` the answer is a reference; its value is kept for ``ttl_s`` seconds once it is there.
    """

    function: Name = ""
    version: Name = ""
    actor: Name = ""
    method: Name = ""
    namespace: Name | None = None
    args: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_ARGUMENTS)] = ()
    kwargs: Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=MAX_ARGUMENTS)] = {}
    timeout_s: Deadline | None = None
    is_async: bool = msgspec.field(default=False, name="async")
    ttl_s: PositiveSeconds | None = None


class CallReply(Record):
    """The result of a call, as JSON."""

    result: msgspec.Raw


class RefState(StrEnum):
    """The state of an object that is held by reference."""

    PENDING = "PENDING"
    READY = "READY"
    FAILED = "FAILED"


class HeldRef(Record):
    """An object held by reference. ``task_id`` names the task that makes it, none if it was put."""

    ref: str
    state: RefState
    task_id: str = ""
    name: str = ""
    media_type: str = ""
    nbytes: int = 0
    error: ErrorInfo | None = None
    created_at_s: float = 0.0
    expires_at_s: float | None = None


class HeldRefs(Record):
    """The objects that one token holds."""

    items: tuple[HeldRef, ...] = ()


class PutQuery(Message):
    """The lifetime of an object that is put."""

    ttl_s: PositiveSeconds | None = None


class RefWaitQuery(Message):
    """Time for which the answer may wait for the value."""

    wait_s: Seconds = 0.0


class WaitRefs(Message):
    """A wait until ``num_returns`` of some references are there, or have failed."""

    refs: Annotated[tuple[ObjectId, ...], msgspec.Meta(min_length=1, max_length=MAX_ARGUMENTS)]
    num_returns: Annotated[int, msgspec.Meta(ge=1, le=MAX_ARGUMENTS)] = 1
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] = WAIT_S


class WaitedRefs(Record):
    """The references that are there or have failed, and those that are not."""

    ready: tuple[HeldRef, ...]
    pending: tuple[HeldRef, ...]


class CancelCall(Message):
    """A stop of a call: of ``ref`` or ``task_id``, of which one is given. ``force`` ends its worker."""

    ref: Annotated[str, stated(pattern="^(o_.*)?$")] = ""
    task_id: Annotated[str, stated(pattern="^(t_.*)?$")] = ""
    force: bool = False
    recursive: bool = True


class RegisteredFunction(Record):
    """A function that callers outside know by name and version."""

    name: str
    version: str
    namespace: str
    signature: str = ""
    doc: str = ""


class RegisteredFunctions(Record):
    """The functions of a namespace, or all versions of one."""

    items: tuple[RegisteredFunction, ...] = ()


class FunctionsQuery(Message):
    """The functions that are listed."""

    namespace: Name | None = None
    name: Name = ""
