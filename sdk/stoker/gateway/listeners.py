"""The ports inside the cluster that the gateway holds for processes outside, and who waits there.

A connection that comes is not read until its process has taken it; the two are then joined. A process whose
line to the gateway broke has its port for a while: peers know it as its address.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from stoker.gateway.port import Port
from stoker.gateway.relay import Held
from stoker_wire.data.keep_alive import keep_alive
from stoker_wire.errors import (
    ConflictError,
    NotFoundError,
    PortInUseError,
    StartError,
    UnavailableError,
)
from stoker_wire.process.background import Background

if TYPE_CHECKING:
    from stoker_wire.tls.files import TlsFiles

TAKEN_WITHIN_S = 10.0
"""A connection that is not taken by then is closed."""
_WAITING = 256
"""More connections that wait at one port are closed."""
_PORTS, _PORTS_OF_ONE = 4096, 512
"""Processes that may have ports here: in all, and of one user."""


class Listener:
    """One port inside, of the process ``peer_id``, whose user is ``owner``."""

    def __init__(self, peer_id: str, owner: str, tls: TlsFiles) -> None:
        self.owner = owner
        self.port = Port(f"the gateway's port for {peer_id}", lambda: _Arriving(self), tls)
        self.line: asyncio.Transport | None = None
        """The connection on which the process is told who has come."""
        self._waiting: dict[str, Held] = {}

    def arrived(self, held: Held) -> str:
        """Tell the process of a connection; return the id by which it takes it."""
        connection_id = secrets.token_hex(16)
        if len(self._waiting) >= _WAITING:
            held.transport.abort()
            return ""
        self._waiting[connection_id] = held
        asyncio.get_running_loop().call_later(TAKEN_WITHIN_S, self._late, connection_id)
        if self.line is not None:
            self.line.write(f"{connection_id}\n".encode())
        return connection_id

    def attach(self, line: asyncio.Transport) -> None:
        """Use a new line to the process; those who wait are told to it again."""
        if self.line is not None:
            self.line.abort()
        self.line = line
        for connection_id in self._waiting:
            line.write(f"{connection_id}\n".encode())

    def take(self, connection_id: str) -> Held | None:
        """Return a connection that waits; None if it does not any more."""
        return self._waiting.pop(connection_id, None)

    def left(self, connection_id: str) -> None:
        """Forget a connection that was closed before it was taken."""
        self._waiting.pop(connection_id, None)

    def _late(self, connection_id: str) -> None:
        held = self.take(connection_id)
        if held is not None:
            held.transport.abort()

    async def close(self) -> None:
        """Close the port, and who waits there."""
        await self.port.close()
        while self._waiting:
            self._waiting.popitem()[1].transport.abort()
        if self.line is not None:
            self.line.abort()


class _Arriving(Held):
    """A connection from inside that waits for its process."""

    def __init__(self, listener: Listener) -> None:
        super().__init__(lambda: listener.left(self._id))
        self._listener = listener
        self._id = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait, unread."""
        super().connection_made(transport)
        keep_alive(transport.get_extra_info("socket"))
        self._id = self._listener.arrived(self)


class Listeners:
    """All ports that the gateway holds, by the process that each is for."""

    def __init__(self, host: str, reached_as: str, tls: TlsFiles) -> None:
        self._hosts = (reached_as, host)
        """Where the ports are, at best: not at the addresses of the outside."""
        self._reached_as = reached_as
        self._tls = tls
        self._listeners: dict[str, Listener] = {}
        self._background = Background("listeners")

    def is_one(self, host: str, port: int) -> bool:
        """Return whether this is the port of a process outside."""
        ports = (one.port.number for one in self._listeners.values())
        return host == self._reached_as and port in ports

    def url_of(self, listener: Listener) -> str:
        """Return the URL by which the cluster reaches the process."""
        host = f"[{self._reached_as}]" if ":" in self._reached_as else self._reached_as
        return f"{'https' if self._tls.is_on else 'http'}://{host}:{listener.port.number}"

    async def open(self, peer_id: str, owner: str, port: int) -> Listener:
        """Return the listener of a process: that which it has, or a new one, on ``port`` if that is free.

        ConflictError if it is another's.
        """
        known = self._listeners.get(peer_id)
        if known is not None:
            if known.owner != owner:
                raise ConflictError(f"{peer_id} is a process of {known.owner}, and has a port here")
            return known
        of_one = sum(one.owner == owner for one in self._listeners.values())
        if len(self._listeners) >= _PORTS or of_one >= _PORTS_OF_ONE:
            raise UnavailableError(
                f"{of_one} processes of {owner} have ports at this gateway, {len(self._listeners)} in all\n"
                f"it takes {_PORTS_OF_ONE} of one user, and {_PORTS} in all: end those that are not needed"
            )
        listener = self._listeners[peer_id] = Listener(peer_id, owner, self._tls)
        try:
            await self._listen(listener.port, port)
        except BaseException:
            await self._close(peer_id)
            raise
        return listener

    async def _listen(self, port: Port, number: int) -> None:
        """Listen at the name that the cluster knows, if it is this machine's, else where it can."""
        for host, wanted in ((host, wanted) for host in self._hosts for wanted in (number, 0)):
            try:
                await port.listen(host, wanted, self._reached_as)
            except PortInUseError:
                continue  # somebody has that port by now
            except StartError:
                if host == self._hosts[-1]:
                    raise
            else:
                return

    def line_lost(self, peer_id: str, line: asyncio.Transport, grace_s: float) -> None:
        """Close the port of a process whose line broke, unless it has another within ``grace_s``."""
        listener = self._listeners.get(peer_id)
        if listener is not None and listener.line is line:
            listener.line = None
            self._background.spawn(self._give_up(peer_id, listener, grace_s), name=peer_id)

    async def _give_up(self, peer_id: str, listener: Listener, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        if listener.line is None and self._listeners.get(peer_id) is listener:
            await self._close(peer_id)

    async def _close(self, peer_id: str) -> None:
        await self._listeners.pop(peer_id).close()

    def take(self, connection_id: str) -> Held:
        """Return the connection with this id, for whoever knows it; NotFoundError if it does not wait."""
        for listener in self._listeners.values():
            held = listener.take(connection_id)
            if held is not None:
                return held
        raise NotFoundError("no such connection waits here: it was closed, or taken already")

    async def close(self) -> None:
        """Close all."""
        await self._background.close()
        for peer_id in list(self._listeners):
            await self._close(peer_id)
