"""Both clients send the same headers and bodies, and read the same errors."""

from __future__ import annotations

import json

import msgspec
import pytest

from stoker_wire.errors import InternalError, NotFoundError, UnavailableError
from stoker_wire.http.client.exchange import (
    ReplyReader,
    check_status,
    client_headers,
    deadline_error,
    encode_request,
    query_texts,
    retry_pause_s,
)
from stoker_wire.http.codec import BYTES, JSON, MSGPACK, PROBLEM
from stoker_wire.http.problems import problem_response
from stoker_wire.messages.common import Record
from stoker_wire.version import PROTOCOL_TEXT


class Answer(Record):
    number: int


@pytest.mark.parametrize(
    ("encoding", "decode"), [(JSON, msgspec.json.decode), (MSGPACK, msgspec.msgpack.decode)]
)
def test_a_message_is_encoded_and_says_how(encoding: str, decode: object) -> None:
    assert callable(decode)
    data, headers = encode_request(
        "POST", Answer(number=1), encoding=encoding, accept=encoding, key="r_1"
    )
    assert decode(data) == {"number": 1}
    assert headers == {"Accept": encoding, "Content-Type": encoding, "Idempotency-Key": "r_1"}


@pytest.mark.parametrize("raw", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_bytes_are_sent_as_they_are_and_only_a_post_has_a_key(raw: object) -> None:
    data, headers = encode_request("PUT", raw, encoding=JSON, accept=JSON, key="r_1")
    assert (data, headers) == (b"abc", {"Accept": JSON, "Content-Type": BYTES})
    assert encode_request("GET", None, encoding=JSON, accept=JSON, key="r_1") == (
        None,
        {"Accept": JSON},
    )


def test_every_request_says_who_sends_it_and_which_protocol() -> None:
    headers = client_headers("nodelet n_1")
    assert (headers["Stoker-Peer"], headers["Stoker-Protocol"]) == ("nodelet n_1", PROTOCOL_TEXT)


def test_a_query_is_text_without_what_is_none() -> None:
    assert query_texts({"a": True, "b": False, "c": None, "d": 1.5, "e": "x"}) == {
        "a": "1",
        "b": "0",
        "d": "1.5",
        "e": "x",
    }


def test_a_reply_is_decoded_by_its_type_or_named() -> None:
    replies = ReplyReader()

    def read(content: bytes, content_type: str) -> Answer:
        answer: Answer = replies.decode(content, content_type, Answer, method="GET", url="/v1/x")
        return answer

    assert read(b'{"number": 2}', JSON) == Answer(number=2)
    assert read(msgspec.msgpack.encode({"number": 3}), MSGPACK) == Answer(number=3)
    with pytest.raises(InternalError, match=r"GET /v1/x answered what is no .*Answer"):
        read(b"<html>", JSON)


def test_a_problem_comes_back_as_the_error_that_was_sent() -> None:
    sent = NotFoundError("there is no job", field="job_id", extra={"a": 1})
    status, content_type, body = problem_response(sent, request_id="r_1")
    assert (status, content_type, json.loads(body)["request_id"]) == (404, PROBLEM, "r_1")
    check_status(204, b"", method="GET", url="/v1/x")
    with pytest.raises(NotFoundError, match="there is no job") as caught:
        check_status(status, body, method="GET", url="/v1/x")
    assert (caught.value.field, caught.value.extra) == ("job_id", {"a": 1})


def test_pauses_grow_to_their_bound() -> None:
    assert all(0 <= retry_pause_s(1, initial_s=0.1, max_s=2.0) <= 0.1 for _ in range(100))
    assert all(0 <= retry_pause_s(99, initial_s=0.1, max_s=2.0) <= 2.0 for _ in range(100))
    assert max(retry_pause_s(99, initial_s=0.1, max_s=2.0) for _ in range(1000)) > 0.5


def test_a_passed_deadline_says_how_often_and_why() -> None:
    error = deadline_error("GET", "/v1/x", 0.5, 1, UnavailableError("busy", explain="/v1/why"))
    assert str(error) == "GET /v1/x passed its deadline of 0.5 s after 1 try.\nlast cause: busy."
    assert error.explain == "/v1/why"
    assert "after 2 tries.\nno answer came" in str(deadline_error("GET", "/v1/x", 0.5, 2, None))


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"\x81\xa1\xff\x01", MSGPACK),
        (b"\x81\xa4more" + b"\x91" * 100_000, MSGPACK),
        (b'{"\xff": 1}', JSON),
        (b'{"more": ' + b"[" * 100_000, JSON),
    ],
)
def test_an_answer_that_is_no_text_or_too_deep_is_an_internal_error(
    body: bytes, content_type: str
) -> None:
    with pytest.raises(InternalError, match="same version"):
        ReplyReader().decode(body, content_type, Answer, method="GET", url="/")
    with pytest.raises(InternalError):
        check_status(500, body, method="GET", url="/")
