"""Objects in the shared memory of nodes, and detached ones, which outlive the process that made them.

An object is owned by the process that made it, and lies on the node where that ran, its home; a detached one
is owned by the cluster.
"""

from __future__ import annotations

import hashlib
import os
from enum import StrEnum
from typing import Annotated

import msgspec

from stoker_wire.ids import Prefix
from stoker_wire.messages.common import (
    MAX_INT64,
    MAX_NAME,
    Address,
    Count,
    Int64,
    Message,
    Name,
    ObjectId,
    Record,
    Text,
    Time,
    id_rule,
    states_rule,
)
from stoker_wire.messages.control import ListQuery

CLUSTER = Address("cluster", "", "", "", "")
"""The owner of detached objects: no process, and so without a place at which it could be asked."""
_MARK = f"{Prefix.OBJECT.value}_detached_"
CACHE_NAMESPACE = "stoker.cache"
"""The namespace of cached results: their names say of which function."""
ACTOR_NAMESPACE = "stoker.actors"
"""The namespace of saved states of actors: their names begin with the actor's id and a colon."""
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


class ObjectInfo(Record):
    """An object in a node's shared memory, or ``spilled`` from it to the node's disk.

    ``copy_of`` names the object's home if this is a copy that was pulled from there.
    """

    object_id: ObjectId
    nbytes: Int64
    job_id: str = ""
    owner_id: str = ""
    node_id: str = ""
    created_at_s: Time = 0.0
    spilled: bool = False
    copy_of: str = ""


class SealObjects(Message):
    """Report by a runtime to its nodelet of the objects that it has written to the arena."""

    objects: tuple[ObjectInfo, ...]


class SealedObjects(Record):
    """Answer to the report of objects; ``closed``: this node leaves, so write no more to its memory."""

    closed: bool = False


class MakeRoom(Message):
    """Request of a runtime for room for so many bytes in the node's full shared memory."""

    nbytes: Annotated[int, msgspec.Meta(gt=0, le=MAX_INT64)]


class FreeObjects(Message):
    """Request of an owner to free its objects."""

    object_ids: tuple[ObjectId, ...]


class AdoptObjects(Message):
    """Request of an owner to a node to become the home of objects of which it has copies."""

    object_ids: tuple[ObjectId, ...]
    disk: bool = False
    """Whether it shall keep them, detached ones, in a folder that outlives the nodelet."""


class AdoptedObjects(Record):
    """The objects of which a node is the home now; it has none of the others."""

    objects: tuple[ObjectInfo, ...]


class PullObject(Message):
    """Request to a nodelet to pull an object into its arena. ``node_id`` and ``url`` are of its home, the
    node where it was made; ``nbytes`` is its length.
    """

    node_id: str
    url: str
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT64)]


class FindSources(Message):
    """Request of a nodelet to an object's home for sources to pull from; ``failed`` are nodes that failed."""

    node_id: str
    url: str
    failed: tuple[str, ...] = ()


class ObjectSource(Record):
    """A node that has an object, or is getting it."""

    node_id: str
    url: str


class ObjectSources(Record):
    """Sources to pull an object from, best first; the home is always among them."""

    object: ObjectInfo
    sources: tuple[ObjectSource, ...]


class ReportCopy(Message):
    """Report that a pull of the home's object has ended: with a whole copy on that node, or without."""

    node_id: str
    whole: bool


class ReadyChunks(Record):
    """Number of chunks of an object that a node has, counted from its start."""

    chunks: int


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

    object_id: Annotated[Name, id_rule(Prefix.OBJECT)]
    nbytes: Count
    name: ObjectName = ""
    namespace: Name = "default"
    job_id: Name = ""
    copies: Annotated[int, msgspec.Meta(ge=1, le=MAX_COPIES)] = 1
    disk: bool = False
    path: Text = ""
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
    state: Annotated[str, states_rule(DetachedState)] = ""
