"""The bytes of one stored object. They describe themselves, so that an index can be rebuilt from the files.

::

    magic | id, padded | u32 head length | u64 total length | msgpack(ObjectHead) | data | pad | buffer 0 ...

with every buffer at a multiple of 64 bytes. Bytes after the total length are an older object's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from stoker_wire.errors import ObjectLostError

MAGIC = b"stoker1\n"
ALIGNMENT = 64
_PREFIX = struct.Struct("<8s64sIQ")
PREFIX_NBYTES = _PREFIX.size
_Length = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ObjectHead(msgspec.Struct, frozen=True, array_like=True):
    """Job and owner of an object, and the lengths of its pickle stream and of its raw buffers, in bytes."""

    job_id: str
    owner_id: str
    created_at_s: float
    data_nbytes: _Length
    buffers_nbytes: tuple[_Length, ...]


def pack_head(object_id: str, head: ObjectHead) -> tuple[bytes, int]:
    """Return the bytes before the stream, and the length of the whole object."""
    encoded = msgspec.msgpack.encode(head)
    total = _total(_PREFIX.size + len(encoded), head)
    return _PREFIX.pack(MAGIC, object_id.encode(), len(encoded), total) + encoded, total


def _total(begin: int, head: ObjectHead) -> int:
    total = begin + head.data_nbytes
    for nbytes in head.buffers_nbytes:
        total += -total % ALIGNMENT + nbytes
    return total


def id_of(prefix: bytes) -> str:
    """Return the id of the object that begins with ``PREFIX_NBYTES`` bytes; '' if none does."""
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        return ""
    name: bytes = _PREFIX.unpack_from(prefix)[1]
    return name.rstrip(b"\0").decode(errors="replace")


def read_head(whole: Any) -> tuple[ObjectHead, int, int]:
    """Return the head, where the stream begins, and the whole length; ValueError if it is none."""
    view = memoryview(whole)
    try:
        magic, _, head_nbytes, total = _PREFIX.unpack_from(view)
        begin = _PREFIX.size + head_nbytes
        head = msgspec.msgpack.decode(view[_PREFIX.size : begin], type=ObjectHead)
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a stored object: {error}") from None
    if magic != MAGIC:
        raise ValueError("not a stored object: it begins with other bytes")
    if begin > view.nbytes or total != _total(begin, head):
        raise ValueError("not a stored object: its head announces another length")
    return head, begin, total


def split(whole: memoryview) -> tuple[memoryview, list[memoryview]]:
    """Return the stream and the buffers of a stored object's bytes, without copying.

    ObjectLostError if they are damaged: a view must not be shorter than what was stored.
    """
    try:
        head, begin, total = read_head(whole)
    except ValueError as error:
        raise ObjectLostError(f"the bytes of an object are damaged\n{error}") from None
    if total > whole.nbytes:
        raise ObjectLostError(
            f"the bytes of an object are damaged\n{whole.nbytes} of {total} bytes are there"
        )
    offset = begin + head.data_nbytes
    data, buffers = whole[begin:offset], []
    for nbytes in head.buffers_nbytes:
        offset += -offset % ALIGNMENT
        buffers.append(whole[offset : offset + nbytes])
        offset += nbytes
    return data, buffers


def parts_of(start: bytes, data: Any, buffers: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return (offset, bytes) of everything to be written, in order."""
    parts = [(0, start), (len(start), data)]
    offset = len(start) + len(data)
    for view in buffers:
        offset += -offset % ALIGNMENT
        parts.append((offset, view))
        offset += view.nbytes
    return parts
