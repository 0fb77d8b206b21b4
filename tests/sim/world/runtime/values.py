"""The values of a world's objects: in messages, or in the memory of a node, where its nodelet indexes them.

A value is the id of its object: whoever reads another one has the wrong object.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker_nodelet.objects.index import ObjectIndex
from stoker_wire.errors import NotFoundError, ObjectLostError
from stoker_wire.http.principals import JOBS
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.objects import ObjectInfo

if TYPE_CHECKING:
    from stoker_wire.http.server.request import Request
    from tests.sim.world.node import Node

INLINE_NBYTES = 100
"""Larger values are stored on nodes."""
_PADDING = b"." * INLINE_NBYTES


def value_of(object_id: str, *, large: bool) -> bytes:
    """Return the value of an object."""
    return object_id.encode() + (_PADDING if large else b"")


def is_value_of(object_id: str, value: bytes) -> bool:
    """Return whether this is the value of an object."""
    return value.rstrip(b".") == object_id.encode()


class SimArena:
    """The shared memory of a node, as long as its nodelet lives (:class:`stoker_wire.arena.Arena`)."""

    path = Path("/nonexistent")

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def write(self, object_id: str, _: Any, data: bytes, buffers: Any, reclaim: Any) -> int:
        """Store a value; return its length."""
        self.values[object_id] = data
        return len(data)

    def read(self, object_id: str) -> bytes:
        """Return a value."""
        try:
            return self.values[object_id]
        except KeyError:
            raise ObjectLostError(f"{object_id} is not here") from None

    def recycle(self, object_id: str) -> bool:
        """Drop a value; return whether it was here."""
        return self.values.pop(object_id, None) is not None

    def drop_from_disk(self, object_id: str) -> None:
        """Nothing: no value is on disk."""

    def settle_in_place(self) -> None:
        """Nothing: values do not change."""

    def close(self) -> None:
        """Nothing."""


class SimIndex(ObjectIndex):
    """The real index of a nodelet, over the memory of the world."""

    def _has_file(self, one: ObjectInfo) -> bool:
        return one.object_id in self.arena.values  # type: ignore[attr-defined]

    def add_copy(self, object_id: str, value: bytes, home: str, job_id: str) -> None:
        """Keep what was read from another node."""
        self.arena.values[object_id] = value  # type: ignore[attr-defined]
        self.seal([ObjectInfo(object_id=object_id, nbytes=len(value), job_id=job_id, copy_of=home)])


async def _read_value(node: Node, req: Request) -> bytes:
    value = node.arena.values.get(req.path["id"])
    if value is None:
        raise NotFoundError(f"{req.path['id']} is not on {node.node_id}")
    return value


ROUTES = (
    Route("GET", "/v1/objects/{id}/value", _read_value, roles=JOBS, summary="Return a value"),
)
"""In place of the ranges that the product reads from a socket."""
