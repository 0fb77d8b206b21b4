"""Cases of Schemathesis as requests, and the check of what is answered to them."""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

import jsonschema_rs
import msgspec
from schemathesis.core import NotSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.http._http_api import Api

JSON, MSGPACK, BYTES = "application/json", "application/msgpack", "application/octet-stream"
NDJSON, EVENT_STREAM, PROBLEM = (
    "application/x-ndjson",
    "text/event-stream",
    "application/problem+json",
)
ANSWER_S = 60.0
"""A deadline for hangs: requests ask for an answer within ``STOKER_TIMEOUT_S``."""
STOKER_TIMEOUT_S = "0.2"
QUIET_S = 0.15
"""A stream that has begun and is silent for so long is not waited for any more."""
_STREAM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Sent:
    """A request, as it goes out."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes | None

    def __str__(self) -> str:
        shown = "" if self.body is None else f" {self.body[:400]!r}"
        more = {k: v for k, v in self.headers.items() if k not in ("Authorization", "Host")}
        return f"{self.method} {self.target[:400]} {more}{shown}"


@dataclass(frozen=True, slots=True)
class Got:
    """A reply; of a stream what came until it was silent."""

    status: int
    content_type: str
    body: bytes
    ended: bool


def request_of(method: str, path: str, case: Any, *, accept: str, token: str, host: str) -> Sent:
    """Return the request of a case, whose parts are plain values."""
    target = path
    if case.query:
        target += "?" + urlencode([(k, _text(v)) for k, v in case.query.items() if v is not None])
    headers = {
        **{k: str(v) for k, v in (case.headers or {}).items()},
        "Host": host, "Authorization": f"Bearer {token}", "Accept": accept,
        "Stoker-Timeout-S": STOKER_TIMEOUT_S,
    }  # fmt: skip
    body: bytes | None = None
    if case.media_type is not None and not isinstance(case.body, NotSet):
        headers["Content-Type"], body = _encoded(case.body, case.media_type)
    return Sent(method, target, headers, body)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def _encoded(value: Any, media_type: str) -> tuple[str, bytes]:
    """Return a body with its type: JSON for what msgpack cannot hold, as an integer of 65 bits."""
    if isinstance(value, bytes):
        return media_type, value
    if media_type == MSGPACK:
        with contextlib.suppress(OverflowError, UnicodeEncodeError):
            return media_type, msgspec.msgpack.encode(value)
    if media_type in (JSON, MSGPACK):
        return JSON, json.dumps(value).encode()
    return media_type, str(value).encode(errors="replace")


def filled(path: str, parameters: dict[str, Any]) -> str:
    """Return a path with its parameters, which Schemathesis has quoted already."""
    for name, value in parameters.items():
        path = path.replace(f"{{{name}}}", quote(_text(value), safe="%"))
    return path


class Connection:
    """A kept connection to a service."""

    def __init__(self, api: Api) -> None:
        self.host = urlsplit(api.url).netloc
        self._http = http.client.HTTPConnection(self.host, timeout=ANSWER_S)

    def close(self) -> None:
        """Close it."""
        self._http.close()

    def send(self, sent: Sent) -> Got:
        """Send a request; return its reply."""
        for again in (True, False):
            try:
                self._http.request(sent.method, sent.target, sent.body, sent.headers)
                reply = self._http.getresponse()
                break
            except (http.client.RemoteDisconnected, ConnectionError, BrokenPipeError):
                self._http.close()
                if not again:
                    raise
        content_type = reply.headers.get("Content-Type", "").partition(";")[0]
        streams = reply.headers.get("Transfer-Encoding") == "chunked"
        try:
            body, ended = self._stream(reply) if streams else (reply.read(), True)
        finally:
            if streams:
                self._http.close()
        return Got(reply.status, content_type, body, ended)

    def _stream(self, reply: http.client.HTTPResponse) -> tuple[bytes, bool]:
        assert self._http.sock is not None
        self._http.sock.settimeout(QUIET_S)
        body = b""
        with contextlib.suppress(TimeoutError):
            while len(body) < _STREAM_BYTES:
                part = reply.read1()
                if not part:
                    return body, True
                body += part
        return body, False


class Replies:
    """What a service says of its replies, by its document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def faults(self, operation: dict[str, Any], method: str, got: Got) -> Iterator[str]:
        """Say where a reply departs from the document."""
        response = self._declared(operation["responses"], got.status)
        if response is None:
            yield f"status {got.status} is not documented"
            return
        content = response.get("content")
        if got.status == 204 or method == "HEAD" or (not content and not got.body):
            return
        if content and set(content) == {"*/*"}:
            return
        if not content or got.content_type not in content:
            yield f"{got.content_type!r} of status {got.status} is not documented"
            return
        schema = content[got.content_type].get("schema")
        if schema is None:
            return
        try:
            items = list(_items(got))
        except (msgspec.DecodeError, ValueError) as error:
            yield f"the body is no {got.content_type}: {error}: {got.body[:200]!r}"
            return
        for item in items:
            for error in self._validator(json.dumps(schema)).iter_errors(item):
                yield f"status {got.status}: {error.message} at {error.instance_path}"

    def _declared(self, responses: dict[str, Any], status: int) -> dict[str, Any] | None:
        for name in (str(status), f"{status // 100}XX"):
            if name in responses:
                response: dict[str, Any] = responses[name]
                if "$ref" in response:
                    name = response["$ref"].rpartition("/")[2]
                    response = self._document["components"]["responses"][name]
                return response
        return None

    @functools.cache  # noqa: B019 - one per service and run
    def _validator(self, schema: str) -> Any:
        whole = {**json.loads(schema), "components": self._document["components"]}
        return jsonschema_rs.Draft202012Validator(whole)


def _items(got: Got) -> Iterator[Any]:
    """Yield the documents of a reply, as JSON has them; of a stream those that came whole."""
    if got.content_type == MSGPACK:
        yield _as_json(msgspec.msgpack.decode(got.body))
    elif got.content_type in (JSON, PROBLEM):
        yield json.loads(got.body)
    elif got.content_type == NDJSON:
        *lines, rest = got.body.split(b"\n")
        if got.ended and rest:
            raise ValueError(f"the last line is torn: {rest[:100]!r}")
        yield from (json.loads(line) for line in lines if line)
    elif got.content_type == EVENT_STREAM:
        for block in got.body.split(b"\n\n")[:-1]:
            data = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
            if data:
                yield json.loads(b"\n".join(data))


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {str(k): _as_json(v) for k, v in value.items()}
    return [_as_json(v) for v in value] if isinstance(value, list) else value
