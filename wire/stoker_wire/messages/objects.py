"""Detached objects: those that the cluster owns, so that they outlive the process that made them."""

from __future__ import annotations

import hashlib
import os
from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.ids import Prefix
from stoker_wire.messages.common import Address, Count, Message, Record
from stoker_wire.messages.control import ListQuery
from stoker_wire.messages.work import ObjectSource

CLUSTER = Address("cluster", "", "", "", "")
"""The owner of detached objects: no process, and so without a place at which it could be asked."""
_MARK = f"{Prefix.OBJECT.value}_detached_"
CACHE_NAMESPACE = "stoker.cache"
"""The namespace of cached results: their names say of which function."""
ACTOR_NAMESPACE = "stoker.actors"
"""The namespace of saved states of actors: their names begin with the actor's id and a colon."""
MAX_NAME = 256
MAX_COPIES = 100
MAX_INLINE = 1 << 20
"""A value up to so many bytes may lie in the gcs."""

ObjectName = Annotated[str, msgspec.Meta(max_length=MAX_NAME, pattern=r"^[^\x00/][^\x00]*$|^$")]


def new_detached_id(seed: str = "") -> str:
    """Return the id of a detached object, which tells what it is: a fresh one, or that of ``seed``."""
    if seed:
        return _MARK + hashlib.blake2b(seed.encode(), digest_size=8).hexdigest()
    return _MARK + os.urandom(8).hex()


def is_detached(object_id: str) -> bool:
    """Return whether an id is of a detached object: nobody counts its refs."""
    return object_id.startswith(_MARK)


class DetachedState(StrEnum):
    """The state of a detached object."""

    CREATING = "CREATING"
    """Its name and its bytes are reserved; its value is being written."""
    READY = "READY"
    LOST = "LOST"
    """No node that lives has it; a node with a copy on disk may come back with it."""


class CreateDetachedObject(Message):
    """Request to reserve a detached object, or to create one whose ``value`` the gcs shall keep.

    ``copies`` nodes keep it, in shared memory, or with ``disk`` in a folder that outlives the nodelet.
    ``path`` is the file, of any file system of fsspec, from which it can be read as well.
    """

    object_id: str
    nbytes: Count
    name: ObjectName = ""
    namespace: str = "default"
    job_id: str = ""
    copies: Annotated[int, msgspec.Meta(ge=1, le=MAX_COPIES)] = 1
    disk: bool = False
    path: str = ""
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_INLINE)] | None = None


class DetachedObject(Record):
    """A detached object as the gcs knows it; fields as in :class:`CreateDetachedObject`."""

    object_id: str
    name: str = ""
    namespace: str = "default"
    job_id: str = ""
    nbytes: int = 0
    copies: int = 1
    disk: bool = False
    path: str = ""
    inline: bool = False
    """Whether the gcs itself keeps its value."""
    state: DetachedState = DetachedState.CREATING
    nodes: tuple[str, ...] = ()
    """The nodes that have it, as last seen."""
    created_at_s: float = 0.0
    message: str = ""
    """Why it is lost."""


class LocatedObject(Record):
    """A detached object and from where it can be read: the value itself, or nodes that live."""

    object: DetachedObject
    value: bytes | None = None
    sources: tuple[ObjectSource, ...] = ()


class CommitDetachedObject(Message):
    """Report that a node has the value of a detached object."""

    node_id: str


class LocateObject(Message):
    """Question from where a detached object can be read; ``without`` is a node that has it no more."""

    without: str = ""


class ReportDetachedObjects(Message):
    """Report of a node: all the detached objects that it has."""

    object_ids: Annotated[tuple[str, ...], msgspec.Meta(max_length=100_000)]


class UnknownObjects(Record):
    """The ids that are no detached objects (any more): whoever has them frees them."""

    object_ids: tuple[str, ...] = ()


class DetachedObjectQuery(ListQuery):
    """Filters of detached objects. ``state``: CREATING, READY, LOST; several are separated by commas."""

    name: str = ""
    namespace: str = ""
    job_id: str = ""
    state: str = ""
