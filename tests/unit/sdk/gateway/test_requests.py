"""Requests on one connection: each is seen, whatever pieces its bytes come in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.gateway.requests import RequestReader
from stoker_wire.errors import BadRequestError, PayloadTooLargeError

GET = b"GET /v1/jobs HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /v1/calls HTTP/1.1\r\nContent-Length: 5\r\n\r\nGET /"
CHUNKED = (
    b"POST /v1/refs HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nGET /\r\n10;x=y\r\n0123456789abcdef\r\n0\r\nTrailer: x\r\n\r\n"
)
UPGRADE = b"GET /v1/events HTTP/1.1\r\nUpgrade: websocket\r\n\r\n"
PATHS = {GET: "/v1/jobs", POST: "/v1/calls", CHUNKED: "/v1/refs"}


def fed(pieces: list[bytes]) -> tuple[list[str], bytes]:
    """Return the paths of the requests that are seen, and all bytes that came out."""
    reader, paths, data = RequestReader(), [], b""
    for piece in pieces:
        for part in reader.feed(piece):
            data += part.data
            if part.head is not None:
                paths.append(part.head.path)
    return paths, data


@given(
    requests=st.lists(st.sampled_from([GET, POST, CHUNKED]), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 600), max_size=12),
)
def test_each_request_is_seen_and_no_byte_is_lost_or_changed(
    requests: list[bytes], cuts: list[int]
) -> None:
    whole = b"".join(requests)
    places = sorted({0, *(cut for cut in cuts if cut < len(whole)), len(whole)})
    pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
    paths, data = fed(pieces)
    assert paths == [PATHS[one] for one in requests]
    assert data == whole


def test_behind_an_upgrade_nothing_is_a_request() -> None:
    paths, data = fed([UPGRADE + GET, GET])
    assert paths == ["/v1/events"]
    assert data == UPGRADE + GET + GET


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1x\r\n\r\n",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 5000,
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequestError):
        RequestReader().feed(data)


def test_a_head_has_a_limit() -> None:
    with pytest.raises(PayloadTooLargeError):
        RequestReader().feed(b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000)
