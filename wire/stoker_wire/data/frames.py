"""Frames of the data path: a msgpack head with raw buffers behind it.

::

    u32 head length | head = msgpack([[buffer lengths], [messages]]) | buffer 0 | buffer 1 | ...

Each buffer starts at a multiple of 64 bytes from the start of the frame, so that arrays built on
the received bytes are aligned. Nothing is copied on decode: buffers are views of the frame. A frame
whose buffers are all empty may end with its head.
Called by :mod:`stoker_wire.data.channel`; knows nothing of sockets.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec

from stoker_wire.errors import BadRequestError
from stoker_wire.messages.data import Buffer, DataMessage

ALIGNMENT = 64
_LENGTH = struct.Struct("<I")
_EMPTY = memoryview(b"")
MAX_BUFFERS = 1 << 22
"""Buffers of one frame."""
_Lengths = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_BUFFERS)]


def _padding(offset: int) -> int:
    return -offset % ALIGNMENT


class FrameCodec:
    """An encoder and decoder of frames. One per channel and direction; not for use by two threads."""

    def __init__(self) -> None:
        self._out: list[memoryview] = []
        self._in: list[Buffer] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._enc_hook)
        self._decoder = msgspec.msgpack.Decoder(
            tuple[_Lengths, list[DataMessage]], dec_hook=self._dec_hook
        )

    def encode(self, messages: list[DataMessage]) -> bytes:
        """Return one frame with all ``messages``."""
        return b"".join(self.encode_parts(messages))

    def encode_parts(self, messages: list[DataMessage]) -> list[bytes | memoryview]:
        """Return one frame as the parts that it is made of: buffers are not copied."""
        out: list[memoryview] = []
        self._out = out
        body = self._encoder.encode(messages)
        # [lengths, messages] spliced by hand: the lengths are known only once the body is encoded.
        head = b"\x92" + self._encoder.encode([view.nbytes for view in out]) + body
        if not out:
            return [_LENGTH.pack(len(head)) + head]
        parts: list[bytes | memoryview] = [_LENGTH.pack(len(head)) + head]
        offset = _LENGTH.size + len(head)
        for view in out:
            pad = _padding(offset)
            if pad:
                parts.append(bytes(pad))
            parts.append(view)
            offset += pad + view.nbytes
        self._out = []
        return parts

    def decode(self, frame: bytes | memoryview) -> list[DataMessage]:
        """Return the messages of ``frame``; their buffers are read-only views of it."""
        whole = memoryview(frame)
        if len(frame) < _LENGTH.size:
            raise BadRequestError("a data frame shorter than its length prefix")
        head_end = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
        if head_end > len(frame):
            raise BadRequestError(
                f"a data frame of {len(frame)} bytes announces a head of {head_end}"
            )
        buffers = self._in = []
        try:
            lengths, messages = self._decoder.decode(whole[_LENGTH.size : head_end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequestError(f"a data frame cannot be read\n{error}") from None
        finally:
            self._in = []
        if len(lengths) != len(buffers):
            raise BadRequestError(
                f"a data frame carries {len(lengths)} buffers and refers to {len(buffers)}"
            )
        offset = head_end
        for buffer, nbytes in zip(buffers, lengths, strict=True):
            if not nbytes:
                continue  # costs its sender two bytes: no view of its own for each of millions
            offset += _padding(offset)
            if offset + nbytes > len(frame):
                raise BadRequestError("a data frame is shorter than its buffers")
            buffer.view = whole[offset : offset + nbytes]
            offset += nbytes
        return messages

    def _enc_hook(self, obj: Any) -> int:
        if not isinstance(obj, Buffer):
            raise TypeError(f"{type(obj).__name__} does not travel in frames")
        view = memoryview(obj.view)
        if not view.nbytes:
            view = _EMPTY  # one with a zero in its shape cannot be cast
        self._out.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
        return len(self._out) - 1

    def _dec_hook(self, kind: type, obj: Any) -> Any:
        # Encoding numbers them as it meets them, so each is the next.
        if kind is not Buffer or obj != len(self._in):
            raise BadRequestError(
                f"a data frame refers to buffer {obj!r} where {len(self._in)} comes next"
            )
        buffer = Buffer(_EMPTY)
        self._in.append(buffer)
        return buffer
