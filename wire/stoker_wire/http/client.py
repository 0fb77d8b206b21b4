"""The HTTP client base: one pooled session to one peer, with retries, deadlines and typed errors.

Used by every component to call another, and by the CLI. It must not import the server side, and it
turns nothing into a guess: a peer's problem is raised as the error of its code, and a passed
deadline says what was tried and what went wrong last.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import msgspec

from stoker_wire.errors import (
    DeadlineExceededError,
    InternalError,
    NotLeaderError,
    StokerError,
    UnavailableError,
    error_for,
)
from stoker_wire.http.codec import BYTES, MSGPACK, Codec, encode_msgpack
from stoker_wire.http.connection import BROKEN, Connection, text_of
from stoker_wire.http.problems import error_of
from stoker_wire.ids import IdSource, Prefix
from stoker_wire.messages.control import Event
from stoker_wire.process.log import REQUEST_ID
from stoker_wire.settings import Settings

if TYPE_CHECKING:
    from yarl import URL

_LARGE_BYTES = 1 << 20
_HURRIED_S = 0.05
T = TypeVar("T")


class Client(Connection):
    """Calls one peer, see :class:`Connection`; ``retries`` counts what had to be tried again."""

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
        super().__init__(
            base_url,
            token=token,
            peer=peer,
            timeout_s=timeout_s,
            unix_path=unix_path,
            settings=settings,
            max_connections=max_connections,
        )
        self.retries = 0
        self._retry_initial_s = settings.retry_initial_s
        self._retry_max_s = settings.retry_max_s
        self._next_key = IdSource(Prefix.REQUEST)
        self._codecs: dict[Any, Codec[Any]] = {}

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
        url = self.url_of(path, query)
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
                        again = retry and error.retryable and not self._closed
                        if not again or isinstance(error, NotLeaderError):
                            raise
                        # A last try with no time left is told just that: the cause came before.
                        hurried = left_s < _HURRIED_S and isinstance(error, DeadlineExceededError)
                        cause = cause if hurried and cause is not None else error
                    except BROKEN as error:
                        cause = UnavailableError(f"{method} {url} got no answer\n{text_of(error)}")
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
        # aiohttp warns of large bytes, which it would write in one piece; a BytesIO goes in parts.
        body = io.BytesIO(data) if data is not None and len(data) > _LARGE_BYTES else data
        async with session.request(
            method, url, data=body, headers=headers, allow_redirects=False
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
            try:
                return codec.decode_reply(content, response.headers.get("Content-Type", ""))
            except msgspec.DecodeError as error:
                raise InternalError(
                    f"{method} {url} answered what is no {reply!r}\n"
                    f"{error}\n"
                    "are both sides of the same version?"
                ) from None

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
                again = error.retryable and not self._closed
                if not again or isinstance(error, NotLeaderError):
                    raise
            failures += 1
            self.retries += 1
            await asyncio.sleep(self._pause_s(failures))

    def _pause_s(self, tries: int) -> float:
        """Full jitter: uniform up to a bound that doubles with each try."""
        bound_s = min(self._retry_max_s, self._retry_initial_s * 2.0 ** min(tries - 1, 20))
        return random.uniform(0.0, bound_s)

    def _too_late(
        self, method: str, url: URL, timeout_s: float, tries: int, cause: BaseException | None
    ) -> DeadlineExceededError:
        last = f"\nlast cause: {cause}" if cause is not None else "\nno answer came"
        explain = cause.explain if isinstance(cause, StokerError) else None
        return DeadlineExceededError(
            f"{method} {url} passed its deadline of {timeout_s:g} s after {tries} "
            f"{'try' if tries == 1 else 'tries'}{last}",
            explain=explain,
        )


def _failure(event: Event) -> StokerError:
    payload = event.payload
    return error_for(payload["code"], payload["detail"], extra=payload.get("extra"))
