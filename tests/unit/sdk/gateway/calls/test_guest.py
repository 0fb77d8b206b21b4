"""A connection at a caller: its own requests are answered, the first other one goes back, no byte is lost."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from stoker.gateway.calls.guest import Guest

OURS = b"POST /v1/calls HTTP/1.1\r\nContent-Length: 5\r\n\r\nGET /"
CHUNKED = b"POST /v1/refs HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
THEIRS = b"GET /v1/jobs HTTP/1.1\r\nHost: h\r\n\r\n"


class Server(asyncio.Protocol):
    """The HTTP server, which notes what it is given."""

    def __init__(self) -> None:
        self.data = b""
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        assert not self.is_lost
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


class Line(asyncio.Transport):
    """The client's connection."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})
        self.is_closed = False
        self.written = b""

    def close(self) -> None:
        self.is_closed = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)


@given(
    requests=st.lists(st.sampled_from([OURS, CHUNKED, THEIRS]), min_size=1, max_size=6),
    cuts=st.lists(st.integers(1, 400), max_size=12),
)
def test_no_byte_is_lost_whatever_pieces_they_come_in(
    requests: list[bytes], cuts: list[int]
) -> None:
    sent = b"".join(requests)
    ends = sorted({min(cut, len(sent)) for cut in [*cuts, len(sent)]})
    pieces = [sent[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    ours = b""
    for request in requests:
        if request == THEIRS:
            break
        ours += request
    server, back = Server(), bytearray()

    def give_back(connection: socket.socket, unread: bytes) -> None:
        connection.close()
        back.extend(unread)

    client, end = socket.socketpair()
    with client, end:
        line = Line(end)
        guest = Guest(server, pieces[0], lambda head: head.path != "/v1/jobs", give_back)
        guest.connection_made(cast("asyncio.BaseTransport", line))
        came = len(pieces[0])
        for piece in pieces[1:]:
            if line.is_closed:  # who has the connection now reads the rest
                break
            guest.data_received(piece)
            came += len(piece)
    assert server.data == ours
    assert bytes(back) == sent[len(ours) : came]
    assert line.is_closed == server.is_lost == (THEIRS in requests)


def test_what_is_no_http_is_refused() -> None:
    client, end = socket.socketpair()
    with client, end:
        line = Line(end)
        guest = Guest(Server(), b"\x16\x03\x01\r\n\r\n", lambda _: True, lambda *_: None)
        guest.connection_made(line)
    assert line.written.startswith(b"HTTP/1.1 400 ")
    assert line.is_closed
