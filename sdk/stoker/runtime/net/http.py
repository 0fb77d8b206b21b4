"""The synchronous HTTP client of the CLI and ``stoker.jobs``, on the standard library.

The asyncio client (``stoker_wire.http.client.client``) costs 150 ms to import, which a command line
tool cannot spend. Both are made of ``stoker_wire.http.client.exchange``, so the rules are the same:
bearer token, deadline, typed errors, and a POST that is sent again happens once. In the runtime,
threads of the user call the gcs with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload
from urllib.parse import quote, urlencode, urlsplit

from stoker_wire.errors import (
    ForeignPortError,
    NotReadyError,
    StokerError,
    TlsError,
    UnavailableError,
)
from stoker_wire.http.auth import Credential, credential_of
from stoker_wire.http.client.endpoints import (
    HEDGE_S,
    PROBE_S,
    READY_PATH,
    STEADY_S,
    Endpoints,
    checked_address,
)
from stoker_wire.http.client.exchange import (
    AUTHORIZATION,
    NOT_DECODED,
    TIMEOUT_HEADER,
    ReplyReader,
    check_status,
    client_headers,
    deadline_error,
    encode_request,
    query_texts,
    retry_pause_s,
    unreadable_reply,
)
from stoker_wire.http.client.port_owner import PlainConnection
from stoker_wire.http.codec import JSON, NDJSON
from stoker_wire.http.tolerant import TolerantDecoder
from stoker_wire.tls.files import files_of_env

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from stoker_wire.messages.control import Page

T = TypeVar("T")

TIMEOUT_S = 30.0
SILENCE_S = 35.0
"""A stream that is silent for so long (no keep-alive line either) is dead."""

_FOR_A_PERSON = (ForeignPortError, TlsError)
"""What no other try mends."""
_RETRY_INITIAL_S = 0.05
_RETRY_MAX_S = 1.0
_CHUNK_NBYTES = 256 * 1024
_PAGE = 1000
_CANNOT_REACH = "cannot reach the cluster"
_SLACK_S = 2.0  # the server's answer "too late" says why, so it gets a little longer than we wait


class Content(NamedTuple):
    """A reply as it came."""

    data: bytes
    media_type: str


class HttpClient:
    """A client of one server; every call opens a connection of its own, so threads may share it.

    ``base_url`` is ``http://host:port`` (``https`` with TLS, by the certificates of ``STOKER_TLS_*``), or
    several of one cluster with commas between. ``timeout_s`` is the default deadline of a call.
    """

    def __init__(
        self, base_url: str, *, token: str | Credential, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.base_url = checked_address(base_url)
        self.timeout_s = timeout_s
        self._credential = credential_of(token)
        self._endpoints = Endpoints(self.base_url)
        self._base_headers = client_headers("client", replicas=len(self._endpoints.urls))
        self._replies = ReplyReader()

    def to(self, base_url: str) -> HttpClient:
        """Return a client of another server of the same cluster."""
        return HttpClient(base_url, token=self._credential, timeout_s=self.timeout_s)

    @property
    def _headers(self) -> dict[str, str]:
        return {**self._base_headers, AUTHORIZATION: self._credential.header}

    @overload
    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: type[T],
        query: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> T: ...

    @overload
    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: None = None,
        query: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
        on_sent: Callable[[int], object] | None = None,
    ) -> None: ...

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: Any = None,
        query: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
        on_sent: Callable[[int], object] | None = None,
    ) -> Any:
        """Send one request and return its reply, decoded as ``reply`` (:class:`Content`: as it is).

        ``body`` is a message, sent as JSON, or bytes, sent as they are; ``on_sent`` is called with the
        number of bytes sent so far (from 0 again at another attempt). Failed connections and
        retryable problems are tried again until the deadline. Raises the error that the server
        sent, or UnavailableError with the address that did not answer.
        """
        key = f"r_{os.urandom(8).hex()}"
        data, request_headers = encode_request(method, body, encoding=JSON, accept=JSON, key=key)
        headers = self._headers | request_headers
        if data is not None and on_sent is not None:
            headers["Content-Length"] = str(len(data))
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        tries = 0
        moves = 0
        while True:
            base = self._endpoints.current
            try:
                sending = data if data is None or on_sent is None else _ChunkedBody(data, on_sent)
                return self._once(method, path, query, sending, headers, reply, deadline_s)
            except StokerError as error:
                tries += 1
                if isinstance(error, NotReadyError):
                    self._endpoints.leave(base)
                if self._endpoints.current != base and time.monotonic() < deadline_s:
                    moves += 1
                    if moves % len(self._endpoints.urls):
                        continue  # another one is asked at once
                pause_s = retry_pause_s(tries, initial_s=_RETRY_INITIAL_S, max_s=_RETRY_MAX_S)
                if not error.retryable or isinstance(error, _FOR_A_PERSON):
                    raise
                if time.monotonic() + pause_s >= deadline_s:
                    if error.message.startswith(_CANNOT_REACH):
                        raise  # it names its fix already
                    url = self.base_url + path
                    raise deadline_error(method, url, timeout_s, tries, error) from error
                time.sleep(pause_s)

    def items(
        self, path: str, page: type[Page[T]], query: Mapping[str, object] | None = None
    ) -> Iterator[T]:
        """Yield the items of a list, of all its pages."""
        cursor = ""
        while True:
            asked = {"limit": _PAGE, **(query or {}), "cursor": cursor or None}
            found = self.call("GET", path, reply=page, query=asked)
            yield from found.items
            cursor = found.next_cursor
            if not cursor:
                return

    def exists(self, path: str, *, timeout_s: float | None = None) -> bool:
        """Return whether ``HEAD path`` is answered with success; False for 404."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._request("HEAD", path, None, None, self._headers, limit_s) as response:
            status = response.status
        if status == 404:
            return False
        check_status(status, b"", method="HEAD", url=self.base_url + path)
        return True

    def lines(
        self,
        path: str,
        *,
        item: type[T],
        query: Mapping[str, object] | None = None,
        silence_s: float = SILENCE_S,
    ) -> Iterator[T]:
        """Yield the items of an NDJSON reply; UnavailableError when the connection breaks."""
        decode = TolerantDecoder(item, json=True).decode
        headers = self._headers | {"Accept": NDJSON}
        with self._request("GET", path, query, None, headers, silence_s) as response:
            self._check(response, "GET", path)
            while line := self._read_line(response, path, silence_s):
                if stripped := line.strip():
                    try:
                        one = decode(stripped)
                    except NOT_DECODED as error:
                        url = self.base_url + path
                        raise unreadable_reply(error, item, method="GET", url=url) from None
                    yield one

    @contextlib.contextmanager
    def open_stream(
        self,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        silence_s: float = SILENCE_S,
    ) -> Iterator[HTTPResponse]:
        """Yield the reply of ``GET path``, to be read as a stream; raise the error of a problem.

        UnavailableError when the connection breaks, or is silent for ``silence_s``.
        """
        headers = self._headers | {"Accept": "*/*"}
        with self._request("GET", path, query, None, headers, silence_s) as response:
            source = f"GET {self.base_url}{path}"
            try:
                self._check(response, "GET", path)
                yield response
            except TimeoutError as error:
                if isinstance(error, StokerError):
                    raise
                raise UnavailableError(f"{source} was silent for {silence_s:g} s") from None
            except (ConnectionError, HTTPException) as error:
                if isinstance(error, StokerError):
                    raise
                raise UnavailableError(f"{source} broke off\n{_reason(error)}") from None

    def _read_line(self, response: HTTPResponse, path: str, silence_s: float) -> bytes:
        try:
            return response.readline()
        except TimeoutError:
            cause = f"was silent for {silence_s:g} s"
        except (OSError, HTTPException) as error:
            cause = f"broke off: {_reason(error)}"
        raise UnavailableError(f"GET {self.base_url}{path} {cause}")

    def _once(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None,
        data: bytes | _ChunkedBody | None,
        headers: dict[str, str],
        reply: Any,
        deadline_s: float,
    ) -> Any:
        left_s = max(deadline_s - time.monotonic(), 0.01)
        timed = headers | {TIMEOUT_HEADER: f"{left_s:.3f}"}
        with self._request(method, path, query, data, timed, left_s + _SLACK_S) as response:
            content, url = response.read(), self.base_url + path
            check_status(response.status, content, method=method, url=url)
            if reply is None:
                return None
            content_type = response.getheader("Content-Type", "")
            if reply is Content:
                return Content(content, content_type.partition(";")[0].strip())
            return self._replies.decode(content, content_type, reply, method=method, url=url)

    def _check(self, response: HTTPResponse, method: str, path: str) -> None:
        if response.status >= 300:
            url = self.base_url + path
            check_status(response.status, response.read(), method=method, url=url)

    @contextlib.contextmanager
    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, object] | None,
        data: bytes | _ChunkedBody | None,
        headers: dict[str, str],
        timeout_s: float,
    ) -> Iterator[HTTPResponse]:
        base = self._endpoints.current
        target = urlsplit(base).path + quote(path, safe="/:@!$&'()*+,;=~-._%")
        if query:
            target += "?" + urlencode(query_texts(query))
        connection = connection_to(base, timeout_s)
        try:
            try:
                connection.request(method, target, body=data, headers=headers)
                if self._endpoints.several:
                    self._attend(base, connection.sock, timeout_s)
                response = connection.getresponse()
            except TimeoutError:
                raise UnavailableError(
                    f"{method} {base}{path} got no answer within {timeout_s:.0f} s"
                ) from None
            except (OSError, HTTPException) as error:
                if isinstance(error, StokerError):
                    raise
                self._endpoints.leave(base)
                if refused := _tls_error(error, f"{method} {base}{path}", base):
                    raise refused from None
                raise UnavailableError(
                    f"{_CANNOT_REACH} at {self._endpoints.tried()}\n"
                    f"{_reason(error)}\n"
                    "is it running? `stoker start --head` starts one, --address names another"
                ) from None
            yield response
        finally:
            connection.close()

    def _attend(self, base: str, line: socket.socket, timeout_s: float) -> None:
        """Wait until an answer begins; UnavailableError once another replica is ready and ``base`` is not."""
        poll = select.poll()
        poll.register(line, select.POLLIN)
        deadline_s = time.monotonic() + timeout_s
        wait_s = HEDGE_S
        while not poll.poll(1000 * min(wait_s, max(deadline_s - time.monotonic(), 0.0))):
            if time.monotonic() >= deadline_s:
                raise TimeoutError
            wait_s = STEADY_S
            if self._is_ready(base):
                continue
            for other in self._endpoints.others:
                if self._is_ready(other):
                    if self._endpoints.current == base:
                        self._endpoints.current = other
                    raise UnavailableError(f"{base} did not answer\n{other} is asked now")

    def _is_ready(self, url: str) -> bool:
        probe = HttpClient(url, token=self._credential)
        try:
            with probe._request("GET", READY_PATH, None, None, self._headers, PROBE_S) as response:
                return response.status < 300
        except UnavailableError:
            return False


class _ChunkedBody:
    """A body in chunks, with a callback after each that gets the number of bytes sent."""

    def __init__(self, data: bytes, on_sent: Callable[[int], object]) -> None:
        self._data = memoryview(data)
        self._on_sent = on_sent

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self._data), _CHUNK_NBYTES):
            chunk = self._data[start : start + _CHUNK_NBYTES]
            yield chunk
            self._on_sent(start + len(chunk))


def connection_to(base: str, timeout_s: float) -> HTTPConnection:
    """Return a connection that is not open yet; TlsError if ``base`` is plain and STOKER_TLS is on."""
    parts, files = urlsplit(base), files_of_env()
    host, port = parts.hostname or "", parts.port
    if parts.scheme != "https" and not files.is_on:
        return PlainConnection(host, port, timeout=timeout_s)
    from stoker_wire.tls.contexts import context_for  # plain connections do not pay for it

    context = context_for(base, files)
    return HTTPSConnection(host, port, timeout=timeout_s, context=context)


def _tls_error(error: Exception, doing: str, base: str) -> TlsError | None:
    if not base.startswith("https:"):
        return None
    from stoker_wire.tls.contexts import tls_error

    return tls_error(error, doing, base)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
