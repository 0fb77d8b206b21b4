"""The connections of one server that have not shown a valid token: few, and not for long.

Anybody who reaches a port can open connections and be silent. Such ones have a time to bring a token, the
oldest goes where there are too many, and none takes the last descriptors, which the process needs for
calls of its own: a nodelet without any sends no heartbeat, and its node counts as dead. One that has shown
a token is exempt from then on. Made by each server; the dispatcher says who has.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aiohttp.http_exceptions import HttpProcessingError

from stoker_wire.process.files.open_files import open_files_limit

if TYPE_CHECKING:
    from aiohttp import web

_log = logging.getLogger(__name__)

RESERVE = 32
"""Descriptors that are left to the process itself."""
_SHARE = 8
"""At most this part of all descriptors is for connections without a token: a head has four servers."""
_LATE_S = 1.0
"""A timer this late says that the process was stopped: what came meanwhile is read before it is judged."""
_WARN_EVERY_S = 60.0


def _ours(record: logging.LogRecord) -> bool:
    """Return whether a log record of aiohttp is about more than bytes of a peer that are no HTTP."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


# Such bytes are answered with status 400. In the log, each would be a traceback that anybody can cause.
logging.getLogger("aiohttp.server").addFilter(_ours)


class Connections:
    """The unproven connections of a server: at most ``limit``, each for at most ``within_s``."""

    def __init__(self, limit: int = 256, within_s: float = 10.0) -> None:
        self._limit = limit
        self._within_s = within_s
        # In the order in which they were made, so that the first is the oldest.
        self._unproven: dict[object, tuple[asyncio.Transport, float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._warn_at_s = 0.0

    def watch(self, server: web.Server | None) -> None:
        """Count the connections that ``server`` accepts from now on."""
        assert server is not None, "the runner is set up"
        accept, forget = server.connection_made, server.connection_lost

        def made(handler: web.RequestHandler, transport: asyncio.Transport) -> None:
            accept(handler, transport)
            self.made(handler, transport)

        def lost(handler: web.RequestHandler, exc: BaseException | None = None) -> None:
            self.proved(handler)
            forget(handler, exc)

        server.connection_made = made  # type: ignore[method-assign]
        server.connection_lost = lost  # type: ignore[method-assign]

    def __len__(self) -> int:
        return len(self._unproven)

    def proved(self, protocol: object) -> None:
        """Exempt the connection of a request that has shown a valid token, or that was closed."""
        self._unproven.pop(protocol, None)

    def answered(self, protocol: object, response: web.StreamResponse) -> None:
        """Have a connection closed after its answer, if it has shown no token."""
        if protocol in self._unproven:
            response.force_close()

    def made(self, protocol: object, transport: asyncio.Transport) -> None:
        """Count a connection from now on, until it has proved itself; close it if there are too many."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._within_s
        self._unproven[protocol] = transport, due_s
        files = open_files_limit()
        if len(self._unproven) > min(self._limit, max(1, files // _SHARE)):
            self._abort(next(iter(self._unproven)))
        # The system gives the lowest free number: a high one says that nearly all are in use.
        elif transport.get_extra_info("socket").fileno() >= files - min(RESERVE, files // _SHARE):
            self._abort(protocol)
            self._warn(loop.time(), files)
        if self._timer is None:
            self._timer = loop.call_at(due_s, self._sweep, due_s)

    def _abort(self, protocol: object) -> None:
        transport, _ = self._unproven.pop(protocol)
        transport.abort()

    def _sweep(self, due_s: float) -> None:
        """Close the connections whose time is over."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if now_s - due_s > _LATE_S:
            now_s += _LATE_S
            self._timer = loop.call_at(now_s, self._sweep, now_s)
            return
        self._timer = None
        while self._unproven:
            protocol, (_, next_s) = next(iter(self._unproven.items()))
            if next_s > now_s:
                self._timer = loop.call_at(next_s, self._sweep, next_s)
                return
            self._abort(protocol)

    def _warn(self, now_s: float, files: int) -> None:
        if now_s >= self._warn_at_s:
            self._warn_at_s = now_s + _WARN_EVERY_S
            _log.warning(
                "connections are refused: this process may have %d files open, and has\n"
                "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd)",
                files,
            )
