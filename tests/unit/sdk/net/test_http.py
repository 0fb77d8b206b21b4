"""The synchronous client against a real socket: errors typed, retries bounded, streams read."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import (
    BadRequestError,
    DeadlineExceededError,
    InternalError,
    NotFoundError,
    UnavailableError,
)
from stoker_wire.http.client.endpoints import checked_url
from stoker_wire.messages.control import LogLine

if TYPE_CHECKING:
    from collections.abc import Iterator


class Script(BaseHTTPRequestHandler):
    """Answers from the server's list of (status, body); the last one for ever."""

    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        server: Any = self.server
        length = int(self.headers.get("Content-Length") or 0)
        server.seen.append((self.command, self.path, dict(self.headers), self.rfile.read(length)))
        status, body = server.script.pop(0) if len(server.script) > 1 else server.script[0]
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Script) as made:
        made.daemon_threads = True
        made.seen, made.script = [], []  # type: ignore[attr-defined]
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join(40)


@pytest.fixture
def client(server: Any) -> HttpClient:
    return HttpClient(f"127.0.0.1:{server.server_port}", token="secret", timeout_s=40.0)


def problem(code: str, status: int, **more: object) -> tuple[int, object]:
    return status, {"code": code, "detail": f"it is {code}", "status": status, **more}


def test_a_call_carries_token_deadline_protocol_and_key(server: Any, client: HttpClient) -> None:
    server.script = [(200, {"a": 1})]
    assert client.call("POST", "/v1/x", {"b": 2}, reply=dict[str, int], query={"q": True}) == {
        "a": 1
    }
    method, path, headers, body = server.seen[0]
    assert (method, path, json.loads(body)) == ("POST", "/v1/x?q=1", {"b": 2})
    assert headers["Authorization"] == "Bearer secret"
    assert headers["Stoker-Protocol"]
    assert headers["Idempotency-Key"]
    assert 0 < float(headers["Stoker-Timeout-S"]) <= 40.0


def test_a_large_body_tells_how_much_of_it_was_sent(server: Any, client: HttpClient) -> None:
    server.script[:] = [problem("unavailable", 503, retryable=True), (200, {})]
    content, counts = bytes(range(256)) * 4000, list[int]()
    client.call("PUT", "/v1/packages/x", content, on_sent=counts.append)
    assert [sent[3] for sent in server.seen] == [content] * 2
    assert counts == sorted(counts[: len(counts) // 2]) * 2, "the second attempt begins again"
    assert counts[-1] == len(content)


def test_a_problem_is_raised_as_the_error_of_its_code(server: Any, client: HttpClient) -> None:
    server.script = [problem("not_found", 404, explain="/v1/why")]
    with pytest.raises(NotFoundError, match="it is not_found") as caught:
        client.call("GET", "/v1/jobs/job_1")
    assert caught.value.explain == "/v1/why"


def test_what_is_no_problem_document_is_an_internal_error(server: Any, client: HttpClient) -> None:
    server.script = [(500, b"<html>")]
    with pytest.raises(InternalError, match="answered 500: <html>"):
        client.call("GET", "/x")


def test_a_retryable_problem_is_tried_again_with_the_same_key(
    server: Any, client: HttpClient
) -> None:
    server.script = [problem("not_ready", 503), problem("not_ready", 503), (200, {})]
    client.call("POST", "/v1/x")
    assert len(server.seen) == 3
    assert len({headers["Idempotency-Key"] for _, _, headers, _ in server.seen}) == 1


def test_retries_end_at_the_deadline_with_the_last_cause(server: Any, client: HttpClient) -> None:
    server.script = [problem("not_ready", 503)]
    with pytest.raises(DeadlineExceededError, match=r"(?s)deadline of 0\.5 s.*it is not_ready"):
        client.call("GET", "/v1/x", timeout_s=0.5)


def test_nobody_there_says_where_and_what_to_do() -> None:
    client = HttpClient("http://127.0.0.1:1", token="x", timeout_s=0.2)
    with pytest.raises(
        UnavailableError, match=r"cannot reach the cluster at http://127\.0\.0\.1:1"
    ):
        client.call("GET", "/v1/nodes")


def test_exists_is_whether_head_finds_it(server: Any, client: HttpClient) -> None:
    server.script = [(200, b""), (404, b"")]
    assert [client.exists("/v1/packages/a"), client.exists("/v1/packages/b")] == [True, False]
    assert [method for method, *_ in server.seen] == ["HEAD", "HEAD"]


def test_lines_skips_the_empty_ones_that_keep_it_alive(server: Any, client: HttpClient) -> None:
    line = {"node_id": "n_1", "worker_id": "w_1", "pid": 1, "name": "f", "text": "hello"}
    encoded = json.dumps(line).encode()
    server.script = [(200, b"\n" + encoded + b"\n\n" + encoded + b"\n")]
    assert [each.text for each in client.lines("/logs", item=LogLine)] == ["hello", "hello"]


def test_a_stream_that_is_refused_raises_its_problem(server: Any, client: HttpClient) -> None:
    server.script = [problem("not_found", 404)]
    with pytest.raises(NotFoundError):
        next(client.lines("/logs", item=LogLine))


def test_a_silent_server_is_unavailable_after_the_silence(client: HttpClient) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = HttpClient(f"127.0.0.1:{mute.getsockname()[1]}", token="x")
        begun = time.monotonic()
        with pytest.raises(UnavailableError):
            next(silent.lines("/logs", item=LogLine, silence_s=0.1))
        assert time.monotonic() - begun < 30.0


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:7600", "http://127.0.0.1:7600"),
        ("http://host:1/", "http://host:1"),
        ("https://proxy/stoker", "https://proxy/stoker"),
        ("http://[::1]:7600", "http://[::1]:7600"),
    ],
)
def test_addresses_are_taken_as_people_write_them(given: str, url: str) -> None:
    assert checked_url(given) == url


@pytest.mark.parametrize("given", ["ftp://x", "http://", "http://h:port", "http://h:99999", "://"])
def test_what_is_no_address_is_refused_with_an_example(given: str) -> None:
    with pytest.raises(BadRequestError, match="write it like http://"):
        checked_url(given)
