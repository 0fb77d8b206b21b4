"""The HTTP client base: one pooled session to one peer, with retries, deadlines and typed errors.

Used by every component to call another, and by the CLI. It must not import the server side, and it
turns nothing into a guess: a peer's problem is raised as the error of its code, and a passed
deadline says what was tried and what went wrong last.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal, TypeVar, overload

import aiohttp
import msgspec
from yarl import URL

from stoker_wire.codec import BYTES, MSGPACK, NDJSON, Codec, encode_msgpack
from stoker_wire.errors import (
    DeadlineExceededError,
    NotLeaderError,
    StokerError,
    UnavailableError,
    error_for,
)
from stoker_wire.ids import IdSource, Prefix
from stoker_wire.messages.control import Event
from stoker_wire.problems import error_of
from stoker_wire.request import REQUEST_ID
from stoker_wire.settings import Settings
from stoker_wire.version import PROTOCOL_HEADER, PROTOCOL_TEXT, VERSION

T = TypeVar("T")

_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
_SKIP = frozenset({"User-Agent", "Accept-Encoding"})
_SILENCE_S = 35.0
"""A watch that says nothing for so long (no bookmark either) is dead."""


class Client:
    """Calls one peer. Use as an async context manager, or ``close`` it.

    ``peer`` is what this side calls itself (``"nodelet n_12"``), shown in the other's messages and
    logs. With ``unix_path`` the connection goes over that socket and ``base_url`` only names it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str,
        peer: str,
        timeout_s: float | None = None,
        unix_path: str | None = None,
        settings: Settings | None = None,
        max_connections: int = 256,
    ) -> None:
        settings = settings or Settings()
        self.base_url = base_url.rstrip("/")
        self.timeout_s = settings.request_timeout_s if timeout_s is None else timeout_s
        self.retries = 0
        self._unix_path = unix_path
        self._max_connections = max_connections
        self._retry_initial_s = settings.retry_initial_s
        self._retry_max_s = settings.retry_max_s
        self._headers = {
            "Authorization": f"Bearer {token}",
            "User-Agent": f"stoker/{VERSION}",
            "Stoker-Peer": peer,
            PROTOCOL_HEADER: PROTOCOL_TEXT,
        }
        self._next_key = IdSource(Prefix.REQUEST)
        self._codecs: dict[Any, Codec[Any]] = {}
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The pooled session, with this client's headers; opened at first use, in its loop."""
        return self._session or self._open_session()

    @overload
    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: type[T],
        query: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
        retry: bool = True,
        idempotency_key: str | None = None,
        raw: Literal[False] = False,
    ) -> T: ...

    @overload
    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: None = None,
        query: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
        retry: bool = True,
        idempotency_key: str | None = None,
        raw: Literal[True],
    ) -> bytes: ...

    @overload
    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: None = None,
        query: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
        retry: bool = True,
        idempotency_key: str | None = None,
        raw: Literal[False] = False,
    ) -> None: ...

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reply: type[Any] | None = None,
        query: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
        retry: bool = True,
        idempotency_key: str | None = None,
        raw: bool = False,
    ) -> Any:
        """Send one request and return its reply, decoded as ``reply`` (or bytes, if ``raw``).

        ``body`` is a message, or bytes sent as they are. Connection failures, 502, 503, 504 and
        retryable problems are tried again until the deadline, with full jitter; a POST carries an
        Idempotency-Key, so that it still happens once. Raises the error that the peer sent;
        DeadlineExceededError names the last cause. A ``not_leader`` is raised at once, since
        another peer must be asked.
        """
        if isinstance(body, (bytes, bytearray, memoryview)):
            data, content_type = bytes(body), BYTES
        elif body is None:
            data, content_type = None, ""
        else:
            data, content_type = encode_msgpack(body), MSGPACK
        headers = {"Accept": BYTES if raw else MSGPACK}
        if content_type:
            headers["Content-Type"] = content_type
        if method == "POST":
            headers["Idempotency-Key"] = idempotency_key or self._next_key()
        request_id = REQUEST_ID.get()
        if request_id:
            headers["X-Request-Id"] = request_id
        url = self._url(path, query)
        loop = asyncio.get_running_loop()
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = loop.time() + timeout_s
        cause: BaseException | None = None
        tries = 0
        deadline = asyncio.timeout_at(deadline_s)
        try:
            async with deadline:
                while True:
                    left_s = deadline_s - loop.time()
                    # A little less than is left, so that the peer's answer "too late" (which says
                    # why) arrives before our own deadline passes.
                    headers["Stoker-Timeout-S"] = f"{max(left_s - min(0.2, left_s * 0.1), 0):.3f}"
                    try:
                        return await self._once(method, url, data, headers, reply, raw)
                    except StokerError as error:
                        if not (retry and error.retryable) or isinstance(error, NotLeaderError):
                            raise
                        cause = error
                    except _BROKEN as error:
                        cause = UnavailableError(f"{method} {url}: {_text(error)}")
                        if not retry:
                            raise cause from error
                    tries += 1
                    self.retries += 1
                    pause_s = self._pause_s(tries)
                    if loop.time() + pause_s >= deadline_s:
                        raise self._too_late(method, url, timeout_s, tries, cause)
                    await asyncio.sleep(pause_s)
        except TimeoutError as error:
            # A StokerError may be a TimeoutError too: it says more than we could.
            if isinstance(error, StokerError) or not deadline.expired():
                raise
            raise self._too_late(method, url, timeout_s, tries + 1, cause) from error

    async def _once(
        self,
        method: str,
        url: URL,
        data: bytes | None,
        headers: dict[str, str],
        reply: type[Any] | None,
        raw: bool,
    ) -> Any:
        session = self.session
        async with session.request(
            method, url, data=data, headers=headers, allow_redirects=False
        ) as response:
            content = await response.read()
            if response.status >= 300:
                raise error_of(content, status=response.status, source=f"{method} {url}")
            if raw:
                return content
            if reply is None:
                return None
            codec = self._codecs.get(reply)
            if codec is None:
                codec = self._codecs[reply] = Codec(reply)
            return codec.decode_reply(content, response.headers.get("Content-Type", ""))

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        data: Any = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the open response, for streams and ranges; never retried.

        No deadline but the caller's. Problems are raised like those of :meth:`call`.
        """
        url = self._url(path, query)
        session = self.session
        try:
            async with session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    content = await response.read()
                    raise error_of(content, status=response.status, source=f"{method} {url}")
                yield response
        except _BROKEN as error:
            raise UnavailableError(f"{method} {url}: {_text(error)}") from error

    async def stream(
        self,
        path: str,
        *,
        item: type[T],
        query: Mapping[str, object] | None = None,
        silence_s: float = _SILENCE_S,
    ) -> AsyncGenerator[T, None]:
        """Yield the items of an NDJSON reply. UnavailableError when the connection breaks."""
        decoder = msgspec.json.Decoder(item)
        url = self._url(path, query)
        async with self.open("GET", path, query=query, headers={"Accept": NDJSON}) as response:
            rest = b""
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        part = await response.content.readany()
                except TimeoutError:
                    raise UnavailableError(f"GET {url} was silent for {silence_s:g} s") from None
                if not part:
                    return
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line:
                        yield decoder.decode(line)

    async def watch(
        self, path: str, since: int = 0, query: Mapping[str, object] | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield events after ``since``, for ever; bookmarks are read and left out.

        A broken connection is opened again from the last sequence number seen. CompactedError
        means: list again, then watch from there. Leave early by ``contextlib.aclosing``.
        """
        seq, failures = since, 0
        while True:
            try:
                watched = {**(query or {}), "watch": 1, "since": seq}
                async with aclosing(self.stream(path, item=Event, query=watched)) as events:
                    async for event in events:
                        failures = 0
                        if event.kind == "error":
                            raise _failure(event)
                        seq = max(seq, event.seq)
                        if event.kind != "bookmark":
                            yield event
            except StokerError as error:
                if not error.retryable or isinstance(error, NotLeaderError):
                    raise
            failures += 1
            self.retries += 1
            await asyncio.sleep(self._pause_s(failures))

    async def ws(
        self,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        max_msg_bytes: int = 0,
        heartbeat_s: float | None = 15.0,
        timeout_s: float | None = None,
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket; ``max_msg_bytes`` 0 means no limit. UnavailableError if it fails."""
        url = self._url(path, query)
        session = self.session
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await session.ws_connect(
                    url, max_msg_size=max_msg_bytes, heartbeat=heartbeat_s, compress=0
                )
        except TimeoutError:
            raise DeadlineExceededError(
                f"opening a WebSocket to {url} passed its deadline of {timeout_s:g} s"
            ) from None
        except (aiohttp.WSServerHandshakeError, *_BROKEN) as error:
            raise UnavailableError(f"opening a WebSocket to {url}: {_text(error)}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._unix_path is not None:
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(
                self._unix_path, limit=self._max_connections, keepalive_timeout=60.0
            )
        else:
            connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=60.0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            skip_auto_headers=_SKIP,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            auto_decompress=False,
            trust_env=False,
        )
        return self._session

    def _url(self, path: str, query: Mapping[str, object] | None) -> URL:
        url = self._urls.get(path)
        if url is None:
            url = URL(self.base_url + path)
            if len(self._urls) < 256:
                self._urls[path] = url
        if query:
            url = url.with_query({k: _query(v) for k, v in query.items() if v is not None})
        return url

    def _pause_s(self, tries: int) -> float:
        """Full jitter: uniform up to a bound that doubles with each try."""
        bound_s = min(self._retry_max_s, self._retry_initial_s * 2.0 ** min(tries - 1, 20))
        return random.uniform(0.0, bound_s)

    def _too_late(
        self, method: str, url: URL, timeout_s: float, tries: int, cause: BaseException | None
    ) -> DeadlineExceededError:
        last = f"; last cause: {cause}" if cause is not None else "; no answer came"
        explain = cause.explain if isinstance(cause, StokerError) else None
        return DeadlineExceededError(
            f"{method} {url} passed its deadline of {timeout_s:g} s after {tries} "
            f"{'try' if tries == 1 else 'tries'}{last}",
            explain=explain,
        )


def _failure(event: Event) -> StokerError:
    payload = event.payload
    return error_for(payload["code"], payload["detail"], extra=payload.get("extra"))


def _query(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
