"""The requests to a gateway and its answers, in any pieces."""

from __future__ import annotations

import pytest

from stoker_wire.errors import BadRequestError, ForbiddenError, StokerError, UnavailableError
from stoker_wire.http.gateway.protocol import (
    ACCEPT_PATH,
    HEAD_END,
    HEAD_NBYTES,
    AnswerReader,
    connect_request,
    parse_request,
    upgrade_request,
)
from stoker_wire.http.problems import problem_response

URL = "http://gateway:7601"


def refusal() -> bytes:
    status, _, body = problem_response(ForbiddenError("no machine of this cluster"))
    return f"HTTP/1.1 {status} no\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("host", "target"),
    [("node", "node:1234"), ("10.0.0.1", "10.0.0.1:1234"), ("::1", "[::1]:1234")],
)
def test_a_request_to_connect_says_where_and_for_whom(host: str, target: str) -> None:
    request = parse_request(connect_request(host, 1234, "secret").removesuffix(HEAD_END))
    assert (request.method, request.target, request.token) == ("CONNECT", target, "secret")


def test_a_request_to_accept_has_its_query() -> None:
    raw = upgrade_request(ACCEPT_PATH, "secret", "gateway:7601", id="a b&c", port=5)
    request = parse_request(raw.removesuffix(HEAD_END))
    assert (request.path, request.query) == (ACCEPT_PATH, {"id": "a b&c", "port": "5"})
    assert request.headers["host"] == "gateway:7601"
    assert request.token == "secret"


@pytest.mark.parametrize("raw", [b"", b"GET /", b"GET / SPDY/1", b"\xff\xfe\x00", b"A B C D"])
def test_what_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequestError):
        parse_request(raw)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_answer_is_read_in_pieces_and_nothing_behind_it_is_lost(size: int) -> None:
    reader = AnswerReader(URL)
    raw = b"HTTP/1.1 101 Switching Protocols\r\nStoker-Url: http://x:1\r\n\r\nbehind"
    came = b""
    for at in range(0, len(raw), size):
        piece = raw[at : at + size]
        if (behind := reader.feed(piece)) is not None:
            came = behind + raw[at + size :]
            break
    assert came == b"behind"
    assert reader.headers == {"stoker-url": "http://x:1"}


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_error_of_the_gateway_is_raised_as_what_it_is(size: int) -> None:
    reader, raw = AnswerReader(URL), refusal()
    with pytest.raises(ForbiddenError, match="no machine of this cluster"):
        for at in range(0, len(raw), size):
            assert reader.feed(raw[at : at + size]) is None


def test_a_half_error_is_told_at_the_end_of_the_connection() -> None:
    reader = AnswerReader(URL)
    assert reader.feed(refusal()[:-10]) is None
    with pytest.raises(StokerError, match="answered 403"):
        reader.feed(b"")


@pytest.mark.parametrize("raw", [b"", b"SSH-2.0-x\r\n\r\n", b"x" * (HEAD_NBYTES + 1)])
def test_what_is_no_gateway_is_named(raw: bytes) -> None:
    with pytest.raises(UnavailableError, match=URL):
        AnswerReader(URL).feed(raw)
