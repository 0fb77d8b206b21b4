"""The requests on one connection, as far as it takes to see whom each is for: heads, and where bodies end.

The gateway passes bytes on; it reads no body, and answers no request of another service. Pure: bytes in,
parts out.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from stoker_wire.errors import BadRequestError, PayloadTooLargeError, StokerError
from stoker_wire.http.gateway.protocol import HEAD_END, HEAD_NBYTES, RequestHead, parse_request
from stoker_wire.http.problems import problem_response

_LINE_NBYTES = 1 << 12
"""The most that the line before a chunk may have."""


def refusal(error: StokerError) -> bytes:
    """Return the answer that says why a request is refused; the connection is to be closed after it."""
    status, content_type, body = problem_response(error)
    lines = (
        f"HTTP/1.1 {status} {error.code}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return lines.encode() + body


class Part(NamedTuple):
    """Bytes as they came; ``head`` is that of the request which begins with them, if one does."""

    data: bytes
    head: RequestHead | None = None


class _State(Enum):
    HEAD = auto()
    BODY = auto()
    CHUNK_LINE = auto()
    CHUNK = auto()
    TRAILERS = auto()
    OPAQUE = auto()
    """The connection was upgraded: whatever comes is for who has it."""


class RequestReader:
    """A reader of the requests of one connection, which is given the bytes as they come."""

    def __init__(self) -> None:
        self._state = _State.HEAD
        self._data = b""
        self._left = 0
        """Bytes of the body, or of the chunk with its end of line, that are still to come."""

    @property
    def unread(self) -> bytes:
        """The bytes behind the last part, which are not whole yet."""
        return self._data

    def feed(self, data: bytes) -> list[Part]:
        """Return the parts that are whole; BadRequestError if it is no HTTP/1.1."""
        self._data += data
        parts: list[Part] = []
        while self._data and (part := self._next()) is not None:
            parts.append(part)
        return parts

    def _next(self) -> Part | None:
        match self._state:
            case _State.HEAD:
                return self._head()
            case _State.BODY:
                return self._some(_State.HEAD)
            case _State.CHUNK_LINE:
                return self._chunk_line()
            case _State.CHUNK:
                return self._some(_State.CHUNK_LINE)
            case _State.TRAILERS:
                return self._trailers()
            case _State.OPAQUE:
                return Part(self._take(len(self._data)))

    def _take(self, count: int) -> bytes:
        taken, self._data = self._data[:count], self._data[count:]
        return taken

    def _head(self) -> Part | None:
        end = self._data.find(HEAD_END)
        if end > HEAD_NBYTES or (end < 0 and len(self._data) > HEAD_NBYTES):
            raise PayloadTooLargeError(f"the request's head is larger than {HEAD_NBYTES} bytes")
        if end < 0:
            return None
        head = parse_request(self._data[:end])
        self._state, self._left = _body_of(head)
        return Part(self._take(end + len(HEAD_END)), head)

    def _some(self, then: _State) -> Part:
        taken = self._take(self._left)
        self._left -= len(taken)
        if not self._left:
            self._state = then
        return Part(taken)

    def _line(self) -> bytes | None:
        end = self._data.find(b"\r\n")
        if end > _LINE_NBYTES or (end < 0 and len(self._data) > _LINE_NBYTES):
            raise BadRequestError(f"a line of a chunked body is longer than {_LINE_NBYTES} bytes")
        return None if end < 0 else self._take(end + 2)

    def _chunk_line(self) -> Part | None:
        line = self._line()
        if line is None:
            return None
        size = line.partition(b";")[0].strip()
        try:
            length = int(size, 16)
        except ValueError:
            length = -1
        if length < 0 or not size.isalnum():
            raise BadRequestError(f"{size[:20]!r} is no length of a chunk")
        self._left = length + 2
        self._state = _State.CHUNK if length else _State.TRAILERS
        return Part(line)

    def _trailers(self) -> Part | None:
        line = self._line()
        if line == b"\r\n":
            self._state = _State.HEAD
        return None if line is None else Part(line)


def _body_of(head: RequestHead) -> tuple[_State, int]:
    if "upgrade" in head.headers or head.method == "CONNECT":
        return _State.OPAQUE, 0
    if head.headers.get("transfer-encoding", "").lower().endswith("chunked"):
        return _State.CHUNK_LINE, 0
    length = head.headers.get("content-length", "0")
    if not length.isdecimal() or not length.isascii():
        raise BadRequestError(
            f"Content-Length: {length[:20]!r} is no length", field="Content-Length"
        )
    return (_State.BODY, int(length)) if int(length) else (_State.HEAD, 0)
