"""The HTTP client of every component: one pooled session to one peer, deadlines and typed errors.

A call is repeated until its deadline, and a POST still happens once; streams and WebSockets are never
repeated here. Nothing is guessed: a peer's problem is raised as the error of its code, and a passed
deadline says what was tried and what went wrong last. The server side must not be imported.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
)
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import aiohttp
from yarl import URL

from stoker_wire.errors import (
    DeadlineExceededError,
    NotLeaderError,
    NotReadyError,
    StokerError,
    TlsError,
    UnavailableError,
    error_for,
)
from stoker_wire.http.auth import Credential, credential_of
from stoker_wire.http.client.endpoints import READY_PATH, Endpoints
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
from stoker_wire.http.client.port_owner import check_port_owner
from stoker_wire.http.client.replicas import Replicas
from stoker_wire.http.codec import BYTES, MSGPACK, NDJSON, encode_msgpack
from stoker_wire.http.tolerant import TolerantDecoder
from stoker_wire.ids import IdSource, Prefix
from stoker_wire.messages.control import Event, Page
from stoker_wire.process.log import REQUEST_ID
from stoker_wire.settings import Settings
from stoker_wire.tls.contexts import context_for, tls_error
from stoker_wire.tls.files import files_of

if TYPE_CHECKING:
    from stoker_wire.http.gateway.route import GatewayRoute

T = TypeVar("T")

_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
"""What aiohttp raises when a connection cannot be made or breaks."""

_WS_TIMEOUT = aiohttp.ClientWSTimeout(ws_close=0.3)
"""A peer that does not answer, answers a close no better."""
_SKIP = frozenset({"User-Agent", "Accept-Encoding"})
_SILENCE = 3.5
"""A stream that is silent for so many bookmark intervals is dead."""
_LARGE_BYTES = 1 << 20
_HURRIED_S = 0.05
_MAX_URLS = 256
_PAGE = 1000


class Client:
    """A pooled session to ``base_url``; use as an async context manager, or ``close`` it.

    With several URLs of one service, separated by commas, one is used until it fails
    (:mod:`stoker_wire.http.client.endpoints`).
    ``peer`` is what this side calls itself (``"nodelet n_12"``), shown in the other's messages and
    logs. With ``unix_path`` the connection goes over that socket and ``base_url`` only names it.
    ``timeout_s`` is the deadline of a call that names none (default: the settings'). ``retries``
    counts what was tried again.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str | Credential,
        peer: str,
        timeout_s: float | None = None,
        unix_path: str | None = None,
        settings: Settings | None = None,
        max_connections: int = 256,
        gateway: GatewayRoute | None = None,
    ) -> None:
        settings = settings or Settings()
        self._gateway = gateway
        self._endpoints = Endpoints(base_url)
        self._replicas = (
            Replicas(self._endpoints, self._is_ready) if self._endpoints.several else None
        )
        self.urls = self._endpoints.urls
        self.base_url = ",".join(self.urls)
        self.timeout_s = settings.request_timeout_s if timeout_s is None else timeout_s
        self.retries = 0
        self._unix_path = unix_path
        self.tls = files_of(settings)
        self._max_connections = max_connections
        self._silence_s = _SILENCE * settings.bookmark_s
        self._retry_initial_s = settings.retry_initial_s
        self._retry_max_s = settings.retry_max_s
        self._credential = credential_of(token)
        self._sent = ""
        """The header of the token that the session sends."""
        self._headers = client_headers(peer, replicas=len(self.urls))
        self._next_key = IdSource(Prefix.REQUEST)
        self._replies = ReplyReader()
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
        if self._replicas is not None:
            await self._replicas.close()
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The pooled session, with this client's headers; opened at first use, in its loop."""
        session = self._session or self._open_session()
        header = self._credential.header
        if self._sent is not header:
            session.headers[AUTHORIZATION] = self._sent = header
        return session

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
        data, headers = encode_request(
            method,
            body,
            encoding=MSGPACK,
            accept=BYTES if raw else MSGPACK,
            key=idempotency_key or self._next_key(),
        )
        request_id = REQUEST_ID.get()
        if request_id:
            headers["X-Request-Id"] = request_id
        loop = asyncio.get_running_loop()
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline_s = loop.time() + timeout_s
        cause: BaseException | None = None
        tries = moves = 0
        url = self.url_of(path, query)
        deadline = asyncio.timeout_at(deadline_s)
        try:
            async with deadline:
                while True:
                    left_s = deadline_s - loop.time()
                    # A little less than is left, so that the peer's answer "too late" (which says
                    # why) arrives before our own deadline passes.
                    headers[TIMEOUT_HEADER] = f"{max(left_s - min(0.2, left_s * 0.1), 0):.3f}"
                    url = self.url_of(path, query)
                    base = self._endpoints.current
                    try:
                        if self._replicas is None:
                            return await self._once(method, url, data, headers, reply, raw)
                        async with self._replicas.attend(base):
                            return await self._once(method, url, data, headers, reply, raw)
                    except StokerError as error:
                        moved = await self._moves(base, error)
                        again = retry and error.retryable and not self._closed
                        if not again or isinstance(error, NotLeaderError | TlsError):
                            raise
                        # A last try with no time left only says so: the cause came before.
                        hurried = left_s < _HURRIED_S and isinstance(error, DeadlineExceededError)
                        cause = cause if hurried and cause is not None else error
                    except _BROKEN as error:
                        cause = _unanswered(method, url, error)
                        moved = await self._moves(base, error)
                        refused = isinstance(error, aiohttp.ClientConnectorError)
                        again = retry and not isinstance(cause, TlsError)
                        if not again and not (moved and refused and tries < len(self.urls) - 1):
                            raise self._unreachable(cause) from error
                    tries += 1
                    self.retries += 1
                    moves += moved
                    if moved and moves % len(self.urls):
                        continue  # another one is asked at once
                    pause_s = self._pause_s(tries)
                    if loop.time() + pause_s >= deadline_s:
                        raise self._too_late(method, url, timeout_s, tries, cause)
                    await asyncio.sleep(pause_s)
        except TimeoutError as error:
            # A StokerError may be a TimeoutError too, and says more than this one would.
            if isinstance(error, StokerError) or not deadline.expired():
                raise
            # Its frames are those of the timeout, which has this task, and that will have the error.
            raise self._too_late(
                method, url, timeout_s, tries + 1, cause
            ) from error.with_traceback(None)
        finally:
            # A cycle with this frame, by the error or the task that ends with it, would keep what the
            # frames of its callers have, as refs of objects, until a garbage collection.
            del cause, deadline

    def _too_late(
        self, method: str, url: URL, timeout_s: float, tries: int, cause: BaseException | None
    ) -> DeadlineExceededError:
        if isinstance(cause, UnavailableError):
            cause = self._unreachable(cause)
        return deadline_error(method, url, timeout_s, tries, cause)

    async def _moves(self, base: str, error: Exception) -> bool:
        """Use another URL than ``base``, which failed so, if it is not to be used; return whether."""
        if self._replicas is None:
            return False
        if not isinstance(error, StokerError) or isinstance(error, NotReadyError):
            self._endpoints.leave(base)
            self._replicas.drop(base)
        elif isinstance(error, UnavailableError) and self._endpoints.current == base:
            await self._replicas.check()
        return self._endpoints.current != base

    def _unreachable(self, cause: UnavailableError) -> UnavailableError:
        if self._replicas is None:
            return cause
        return type(cause)(f"{cause.message}\nits replicas: {', '.join(self.urls)}")

    @property
    def url(self) -> str:
        """The URL in use."""
        return self._endpoints.current

    def attend(self, url: str) -> AbstractAsyncContextManager[object]:
        """Return a scope that ends with UnavailableError once ``url`` is not the one in use any more.

        For each wait of what goes on at one URL, as a WebSocket does.
        """
        return nullcontext() if self._replicas is None else self._replicas.attend(url)

    async def _is_ready(self, base: str) -> bool:
        try:
            async with self.session.get(
                base + READY_PATH, headers={"Accept": MSGPACK}, allow_redirects=False
            ) as response:
                return response.status < 300
        except (StokerError, aiohttp.ClientError, OSError):
            return False

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
        # aiohttp warns of large bytes, which it would write in one piece; a BytesIO goes in parts.
        body = io.BytesIO(data) if data is not None and len(data) > _LARGE_BYTES else data
        async with session.request(
            method, url, data=body, headers=headers, allow_redirects=False
        ) as response:
            content = await response.read()
            check_status(response.status, content, method=method, url=url)
            if raw or reply is None:
                return content if raw else None
            content_type = response.headers.get("Content-Type", "")
            return self._replies.decode(content, content_type, reply, method=method, url=url)

    async def items(self, path: str, page: type[Page[T]], **options: Any) -> list[T]:
        """Return the items of a list, of all its pages; ``options`` are those of each :meth:`call`."""
        items: list[T] = []
        cursor = ""
        while True:
            query = {"limit": _PAGE, "cursor": cursor or None}
            found = await self.call("GET", path, reply=page, query=query, **options)
            items += found.items
            cursor = found.next_cursor
            if not cursor:
                return items

    async def watch(
        self, path: str, since: int = 0, query: Mapping[str, object] | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield events after ``since`` without end; bookmarks are read and left out.

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
                again = error.retryable and not self._closed
                if not again or isinstance(error, NotLeaderError):
                    raise
            failures += 1
            self.retries += 1
            await asyncio.sleep(self._pause_s(failures))

    def _pause_s(self, tries: int) -> float:
        return retry_pause_s(tries, initial_s=self._retry_initial_s, max_s=self._retry_max_s)

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
        url, base = self.url_of(path, query), self.url
        async with AsyncExitStack() as stack:
            try:
                async with self.attend(base):
                    response = await stack.enter_async_context(
                        self.session.request(
                            method, url, data=data, headers=headers, allow_redirects=False
                        )
                    )
                    if response.status >= 300:
                        content = await response.read()
                        check_status(response.status, content, method=method, url=url)
                yield response
            except _BROKEN as error:
                await self._moves(base, error)
                raise _unanswered(method, url, error) from error
            except NotReadyError as error:
                await self._moves(base, error)
                raise

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
        decoder = TolerantDecoder(item, json=True)
        url, base = self.url_of(path, query), self.url
        headers, data = {"Accept": NDJSON}, None
        if body is not None:
            headers["Content-Type"], data = MSGPACK, encode_msgpack(body)
        method = "GET" if data is None else "POST"
        async with self.open(method, path, data=data, query=query, headers=headers) as response:
            rest = b""
            while True:
                try:
                    async with self.attend(base), asyncio.timeout(silence_s):
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
                        try:
                            one = decoder.decode(line)
                        except NOT_DECODED as error:
                            raise unreadable_reply(error, item, method=method, url=url) from None
                        yield one

    async def ws(
        self,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        max_msg_bytes: int = 1 << 16,
        heartbeat_s: float | None = 15.0,
        timeout_s: float | None = None,
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket; UnavailableError if it fails. A longer message than that ends it."""
        url, base = self.url_of(path, query), self._endpoints.current
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with self.attend(base), asyncio.timeout(timeout_s):
                return await self.session.ws_connect(
                    url,
                    max_msg_size=max_msg_bytes + 1,  # aiohttp's bound is exclusive
                    heartbeat=heartbeat_s,
                    compress=0,
                    timeout=_WS_TIMEOUT,
                )
        except TimeoutError:
            raise DeadlineExceededError(
                f"opening a WebSocket to {url} passed its deadline of {timeout_s:g} s"
            ) from None
        except (aiohttp.WSServerHandshakeError, *_BROKEN) as error:
            await self._moves(base, error)
            raise tls_error(error, f"a WebSocket to {url}", url) or UnavailableError(
                f"cannot open a WebSocket to {url}\n{_text_of(error)}"
            ) from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise UnavailableError(f"the connections to {self.base_url} are closed")
        if self._unix_path is not None:
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(
                self._unix_path, limit=self._max_connections, keepalive_timeout=60.0
            )
        elif self._gateway is not None and self._gateway.leads_to(self._endpoints.current):
            connector = _GatewayConnector(self._gateway, self._max_connections)
        else:
            contexts = [context for url in self.urls if (context := context_for(url, self.tls))]
            connector = _Connector(
                limit=self._max_connections,
                keepalive_timeout=60.0,
                ssl=contexts[0] if contexts else True,
            )
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
        whole = self._endpoints.current + path
        url = self._urls.get(whole)
        if url is None:
            url = URL(whole)
            if len(self._urls) < _MAX_URLS:
                self._urls[whole] = url
        if query:
            url = url.with_query(query_texts(query))
        return url


def _unanswered(method: str, url: URL, error: Exception) -> UnavailableError:
    if isinstance(error.__cause__, UnavailableError):
        return error.__cause__  # a connector's own, which aiohttp takes for one of the system
    return tls_error(error, f"{method} {url}", url) or UnavailableError(
        f"{method} {url} got no answer\n{_text_of(error)}"
    )


class _Connector(aiohttp.TCPConnector):
    """A pool of connections of which none sends anything to a foreign user of this machine."""

    async def _wrap_create_connection(self, *args: Any, **options: Any) -> Any:
        transport, protocol = await super()._wrap_create_connection(*args, **options)
        if not options.get("ssl"):
            try:
                check_port_owner(transport.get_extra_info("socket"))
            except BaseException:
                transport.abort()
                raise
        return transport, protocol


class _GatewayConnector(aiohttp.TCPConnector):
    """A pool of connections that a gateway has joined, which knows the names that we need not know."""

    def __init__(self, gateway: GatewayRoute, limit: int) -> None:
        super().__init__(limit=limit, keepalive_timeout=60.0)
        self._gateway = gateway

    async def _create_direct_connection(
        self, req: aiohttp.ClientRequest, *_: Any, **__: Any
    ) -> Any:
        url = req.url
        return await self._gateway.create_connection(
            self._factory, url.raw_host or "", url.port or 80
        )


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _failure(event: Event) -> StokerError:
    payload = event.payload
    return error_for(payload["code"], payload["detail"], extra=payload.get("extra"))
