"""Marks in a worker's log: from here on it is this task's output, to this stream.

The worker writes them (``stoker.runtime.worker.output``), its nodelet reads them. Each is authenticated by
a key that the nodelet gives to that worker alone and that no file holds, so that nothing that is printed, by
a task or by a program that it starts, passes for a mark. A copied one says only what the worker itself has
said. Code inside the worker can find the key: the name is its job's word, the process id the node's.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b
from typing import NamedTuple

from stoker_wire.messages.control import LogStream

START = b"\x1estoker:"
KEY_BYTES = 16
_DIGEST_BYTES = 8
_MAX_CELL = 64
_STREAMS = {stream.value: stream for stream in LogStream}


class Mark(NamedTuple):
    """Whose output follows: the stream, the name ('': what the lease names), the notebook's cell."""

    stream: LogStream = LogStream.STDOUT
    name: str = ""
    cell: str = ""


def mark_line(key: bytes, mark: Mark) -> bytes:
    """Return the line that says so."""
    cell = f"/{mark.cell}" if mark.cell else ""
    said = f"{mark.stream}{cell}:{mark.name}".replace("\n", " ").encode(errors="replace")
    return b"%b%b:%b\n" % (START, _digest(key, said), said)


def read_mark(key: bytes, line: bytes) -> Mark | None:
    """Return what a mark says; None for any other line, and for one of another key.

    Code that has found its worker's key may mark a stream that there is none of: no mark either.
    """
    if not line.startswith(START) or not key:
        return None
    digest, _, said = line.removeprefix(START).removesuffix(b"\n").partition(b":")
    if not hmac.compare_digest(digest, _digest(key, said)):
        return None
    where, _, name = said.decode(errors="replace").partition(":")
    stream, _, cell = where.partition("/")
    return Mark(_STREAMS[stream], name, cell[:_MAX_CELL]) if stream in _STREAMS else None


def _digest(key: bytes, said: bytes) -> bytes:
    return blake2b(said, key=key, digest_size=_DIGEST_BYTES).hexdigest().encode()
