"""TLS over a non-blocking socket that somebody else waits for: what the data path has for a plain socket.

The thread that waits for a channel polls its descriptor (ADR 0013), so nothing that has arrived may lie
here unread unless :attr:`TlsSocket.has_more` says so, and nothing that was taken to be sent may be forgotten:
the last byte counts as sent only when all that was encrypted has left. All calls are made in the place of
one loop thread, so there is no lock. The connection ends without TLS's own farewell: frames have lengths.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

_RECV_NBYTES = 1 << 16
_MOST_NBYTES = 1 << 20
"""Bytes read or sent at a time: one connection must not hold up the others."""
_ENCRYPTED_AT_ONCE_NBYTES = 1 << 18


class TlsSocket:
    """A connected socket and its TLS, with what frames need of a socket."""

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
    ) -> None:
        self._sock = sock
        self._tls = tls
        self._incoming = incoming
        self._outgoing = outgoing
        self._received = memoryview(bytearray(_RECV_NBYTES))
        self._left = memoryview(b"")
        """What is encrypted and has not left."""
        self._held = 0
        """Bytes that are encrypted and were not called sent: the last one, while something is left."""

    @property
    def has_more(self) -> bool:
        """Whether something may lie here that no readiness of the descriptor will tell."""
        return bool(self._tls.pending() or self._incoming.pending)

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 once it is closed."""
        return self._sock.fileno()

    def recv_into(self, buffer: memoryview) -> int:
        """Fill ``buffer`` as far as there is something; 0 at the end. BlockingIOError if nothing is there."""
        nbytes, most = 0, min(buffer.nbytes, _MOST_NBYTES)
        while nbytes < most:
            # An error that says "nothing is there" costs more than to look.
            if not self.has_more and (nbytes or not self._fill()):
                break
            try:
                part = cast("int", self._tls.read(most - nbytes, buffer[nbytes:]))
            except ssl.SSLWantReadError:  # a part of a record
                if nbytes or not self._fill():
                    break
                continue
            except ssl.SSLZeroReturnError:
                break
            if not part:
                break
            nbytes += part
        return nbytes

    def _fill(self) -> bool:
        """Take what the socket has; return False at the end. BlockingIOError if nothing is there."""
        received = self._sock.recv_into(self._received)
        self._incoming.write(self._received[:received])
        return received > 0

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        """Send buffers one behind the other as far as they are taken; return how many bytes were.

        Those that were not must be given again. BlockingIOError if none is taken.
        """
        self._flush()
        skip, self._held, nbytes = self._held, 0, 0
        for part in parts:
            view = memoryview(part)[skip:]
            nbytes, skip = nbytes + skip, 0
            while view:
                taken = self._tls.write(view[:_ENCRYPTED_AT_ONCE_NBYTES])
                view, nbytes = view[taken:], nbytes + taken
                if self._outgoing.pending >= _ENCRYPTED_AT_ONCE_NBYTES and not self._leaves():
                    return nbytes - self._held
            if nbytes >= _MOST_NBYTES:
                break
        self._leaves()
        return nbytes - self._held

    def _leaves(self) -> bool:
        """Send what is encrypted; return whether all has left."""
        self._left = memoryview(self._outgoing.read())
        with contextlib.suppress(BlockingIOError):
            self._flush()
        self._held = 1 if self._left else 0
        return not self._left

    def _flush(self) -> None:
        while self._left:
            self._left = self._left[self._sock.send(self._left) :]

    def shutdown(self, how: int) -> None:
        """Shut the connection down, without a farewell."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    async def shake_hands(self) -> None:
        """Make the handshake of a client. OSError, and so ssl.SSLError, says why it failed."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._send_encrypted()
                await self._receive_encrypted()
            except ssl.SSLError:
                await self._send_encrypted()  # the alert, for the server's log
                raise
            else:
                await self._send_encrypted()
                return

    async def send_all(self, data: bytes) -> None:
        """Send ``data`` and wait until it has left; before frames are sent."""
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        await self._send_encrypted()

    async def receive(self, nbytes: int) -> bytes:
        """Wait for bytes and return them, at most so many; nothing at the end. Before frames are read."""
        while True:
            try:
                return self._tls.read(nbytes)
            except ssl.SSLWantReadError:
                await self._receive_encrypted()
            except ssl.SSLZeroReturnError:
                return b""

    async def _send_encrypted(self) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, self._outgoing.read())

    async def _receive_encrypted(self) -> None:
        data = await asyncio.get_running_loop().sock_recv(self._sock, _RECV_NBYTES)
        if not data:
            raise ConnectionResetError("the connection was closed during the handshake")
        self._incoming.write(data)


def client_socket(sock: socket.socket, context: ssl.SSLContext, host: str) -> TlsSocket:
    """Return the client's end of a connection to ``host``, whose handshake is still to be made."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=host)
    return TlsSocket(sock, tls, incoming, outgoing)
