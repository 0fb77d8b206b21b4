"""The state machine of a detached object: pure rules over its record (called by ``objects.registry``).

========  =============================  ========
from      event                          to
========  =============================  ========
(none)    created, with its value        READY
(none)    reserved                       CREATING
any       nodes have it                  READY
READY     no node that lives has it      LOST
========  =============================  ========

One that was freed has no record. Its id is never given again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stoker_gcs.state import schema
from stoker_gcs.state.records import RecordTable, Transition
from stoker_wire.messages.events import EventKind
from stoker_wire.messages.objects import DetachedObject, DetachedState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stoker_wire.messages.objects import CreateDetachedObject

OBJECTS: RecordTable[DetachedObject] = RecordTable(
    schema.DETACHED_OBJECTS,
    DetachedObject,
    lambda one: {
        "object_id": one.object_id,
        "job_id": one.job_id,
        "state": one.state.value,
        "namespace": one.namespace,
        "name": one.name,
        "live_name": live_name(one.namespace, one.name) if one.name else None,
    },
    label="detached object",
)
_replace = msgspec.structs.replace


def live_name(namespace: str, name: str) -> str:
    """Return what must be unique among detached objects."""
    return f"{namespace}/{name}"


def created(body: CreateDetachedObject, now_s: float) -> DetachedObject:
    """Return the object that a request creates."""
    inline = body.value is not None
    return DetachedObject(
        object_id=body.object_id,
        name=body.name,
        namespace=body.namespace,
        job_id=body.job_id,
        nbytes=body.nbytes,
        copies=body.copies,
        disk=body.disk,
        path=body.path,
        inline=inline,
        state=DetachedState.READY if inline else DetachedState.CREATING,
        created_at_s=now_s,
    )


def placed(one: DetachedObject, nodes: Iterable[str]) -> Transition[DetachedObject] | None:
    """Record which nodes have it; None if that is known."""
    now_at = tuple(sorted(nodes))
    if one.inline or (one.state is DetachedState.READY and one.nodes == now_at):
        return None
    return Transition(
        _replace(one, state=DetachedState.READY, nodes=now_at, message=""), EventKind.OBJECT_STORED
    )


def lost(one: DetachedObject, message: str) -> Transition[DetachedObject] | None:
    """Record that no node has it."""
    if one.state is not DetachedState.READY or one.inline:
        return None
    return Transition(
        _replace(one, state=DetachedState.LOST, message=message), EventKind.OBJECT_LOST
    )


def charge(one: DetachedObject) -> int:
    """Return the bytes that count against the quota, one for the whole cluster."""
    return one.nbytes if one.inline else one.nbytes * one.copies
