"""An authenticated session to one peer over TCP or a Unix socket: streams and WebSockets.

The lower half of the HTTP client base (``client.Client`` adds calls and watches with retries).
Nothing here retries: a broken connection is an UnavailableError for the caller to judge.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
from yarl import URL

from stoker_wire.errors import DeadlineExceededError, UnavailableError
from stoker_wire.http.codec import MSGPACK, NDJSON, encode_msgpack
from stoker_wire.http.problems import error_of
from stoker_wire.settings import Settings
from stoker_wire.version import PROTOCOL_HEADER, PROTOCOL_TEXT, VERSION

T = TypeVar("T")

BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
"""What aiohttp raises when a connection cannot be made or breaks."""

_SKIP = frozenset({"User-Agent", "Accept-Encoding"})
_SILENCE = 3.5
"""A stream that is silent for so many bookmark intervals is dead."""


class Connection:
    """A pooled session to ``base_url``; use as an async context manager, or ``close`` it.

    ``peer`` is what this side calls itself (``"nodelet n_12"``), shown in the other's messages and
    logs. With ``unix_path`` the connection goes over that socket and ``base_url`` only names it.
    ``timeout_s`` is the deadline of a call that names none (default: the settings').
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
        self._unix_path = unix_path
        self._max_connections = max_connections
        self._silence_s = _SILENCE * settings.bookmark_s
        self._headers = {
            "Authorization": f"Bearer {token}",
            "User-Agent": f"stoker/{VERSION}",
            "Stoker-Peer": peer,
            PROTOCOL_HEADER: PROTOCOL_TEXT,
        }
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, for good: a call that is tried again opens none."""
        self._closed = True
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The pooled session, with this client's headers; opened at first use, in its loop."""
        return self._session or self._open_session()

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
        url = self.url_of(path, query)
        session = self.session
        try:
            async with session.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    content = await response.read()
                    raise error_of(content, status=response.status, source=f"{method} {url}")
                yield response
        except BROKEN as error:
            raise UnavailableError(f"{method} {url} got no answer\n{text_of(error)}") from error

    async def stream(
        self,
        path: str,
        *,
        item: type[T],
        query: Mapping[str, object] | None = None,
        body: object = None,
        silence_s: float | None = None,
    ) -> AsyncGenerator[T, None]:
        """Yield the items of an NDJSON reply; ``body`` is a message to POST.

        UnavailableError when the connection breaks.
        """
        silence_s = self._silence_s if silence_s is None else silence_s
        decoder = msgspec.json.Decoder(item)
        url = self.url_of(path, query)
        headers, data = {"Accept": NDJSON}, None
        if body is not None:
            headers["Content-Type"], data = MSGPACK, encode_msgpack(body)
        method = "GET" if data is None else "POST"
        async with self.open(method, path, data=data, query=query, headers=headers) as response:
            rest = b""
            while True:
                try:
                    async with asyncio.timeout(silence_s):
                        part = await response.content.readany()
                except TimeoutError:
                    raise UnavailableError(
                        f"{method} {url} was silent for {silence_s:g} s"
                    ) from None
                if not part:
                    return
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line:
                        yield decoder.decode(line)

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
        url = self.url_of(path, query)
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
        except (aiohttp.WSServerHandshakeError, *BROKEN) as error:
            raise UnavailableError(f"cannot open a WebSocket to {url}\n{text_of(error)}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise UnavailableError(f"the connections to {self.base_url} are closed")
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

    def url_of(self, path: str, query: Mapping[str, object] | None) -> URL:
        """Return the URL of ``path``; query members that are None are left out."""
        url = self._urls.get(path)
        if url is None:
            url = URL(self.base_url + path)
            if len(self._urls) < 256:
                self._urls[path] = url
        if query:
            url = url.with_query({k: _query(v) for k, v in query.items() if v is not None})
        return url


def _query(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value)


def text_of(error: BaseException) -> str:
    """Return what ``error`` says, or its name if it says nothing."""
    return str(error) or type(error).__name__
