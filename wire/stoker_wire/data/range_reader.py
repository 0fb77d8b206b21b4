"""Reads ranges of objects from a nodelet straight into memory: the receiving end of the data plane.

Blocking on purpose, for threads: ``recv_into`` and the checksum work without the interpreter's lock
and without a copy of their own, which an event loop's streams cannot. Used by the nodelet, whose
threads fill its arena, and by a driver on a machine without a nodelet, which fills its own memory.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import xxhash

from stoker_wire.errors import InternalError, StokerError, UnavailableError
from stoker_wire.http.auth import Credential, credential_of
from stoker_wire.http.client.exchange import AUTHORIZATION, client_headers
from stoker_wire.http.client.port_owner import PlainConnection
from stoker_wire.http.problems import error_of
from stoker_wire.tls.contexts import context_for, tls_error

if TYPE_CHECKING:
    from stoker_wire.http.gateway.route import GatewayRoute
    from stoker_wire.tls.files import TlsFiles

CHUNK_NBYTES = 32 << 20
"""Bytes that are asked for, checked and, where need be, sent again at once."""
CHECKSUM_HEADER = "Stoker-Xxh3"

STALL_S = 10.0
"""A peer that has begun to send and then sends no byte for so long has failed."""
ANSWER_S = 30.0
"""A peer may take so long to begin: the request waits in a queue there."""

_PIECE_NBYTES = 1 << 20
"""Bytes checked at once, while the processor's cache still has them."""


class RangeReader:
    """A persistent connection to the nodelet at ``url``. For one thread, except :meth:`abort`."""

    def __init__(
        self,
        url: str,
        *,
        token: str | Credential,
        peer: str,
        tls: TlsFiles,
        stall_s: float = STALL_S,
        gateway: GatewayRoute | None = None,
    ) -> None:
        self._gateway = gateway
        self._url = url
        self._tls = tls
        self._stall_s = stall_s
        self._http: http.client.HTTPConnection | None = None
        self._credential = credential_of(token)
        self._headers = client_headers(peer)
        self._socket: socket.socket | None = None
        self._aborted = False

    def read(self, object_id: str, begin: int, into: memoryview) -> int:
        """Fill ``into`` (writable bytes) from offset ``begin`` of an object; return its XXH3.

        UnavailableError if the connection broke or the bytes came corrupt; else the error that the
        nodelet sent. What was filled until then must not be used.
        """
        end = begin + into.nbytes - 1
        what = f"bytes {begin}-{end} of {object_id} from {self._url}"
        try:
            return self._read(object_id, begin, end, into, what)
        except BaseException as error:
            self.close()
            broken = isinstance(error, (OSError, http.client.HTTPException))
            if not broken or isinstance(error, StokerError):
                raise
            raise tls_error(error, what, self._url) or UnavailableError(
                f"{what} did not come\n{str(error) or type(error).__name__}"
            ) from error

    def _read(self, object_id: str, begin: int, end: int, into: memoryview, what: str) -> int:
        if self._aborted:
            raise OSError("aborted")
        authorization = {AUTHORIZATION: self._credential.header}
        headers = {**self._headers, **authorization, "Range": f"bytes={begin}-{end}"}
        connection = self._http = self._http or self._connection()
        connection.request("GET", f"/v1/objects/{object_id}", headers=headers)
        self._socket = connection.sock
        if self._aborted:
            raise OSError("aborted")
        _notice_death(self._socket)
        self._socket.settimeout(ANSWER_S)
        response = connection.getresponse()
        self._socket.settimeout(self._stall_s)
        if response.status != 206:
            raise error_of(response.read(), status=response.status, source=what)
        expected = response.getheader(CHECKSUM_HEADER)
        if response.length != into.nbytes or expected is None:
            raise InternalError(f"{what}: answered with {response.length} bytes, {expected!r}")
        checksum = _fill(response, into)
        if checksum != int(expected, 16):
            raise UnavailableError(
                f"{what}: arrived corrupt, XXH3 {checksum:016x} instead of {expected}"
            )
        return checksum

    def abort(self) -> None:
        """Make a :meth:`read` that runs in another thread fail at once."""
        self._aborted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                # Of the connection below TLS, which another thread is using.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next read opens another."""
        self._socket = None
        if self._http is not None:
            self._http.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self._url)
        host, timeout_s = parts.hostname or "", self._stall_s
        if self._gateway is not None:
            return _JoinedConnection(self._gateway, host, parts.port or 80, timeout_s)
        context = context_for(self._url, self._tls)
        if context is None:
            return PlainConnection(host, parts.port or 80, timeout=timeout_s)
        return http.client.HTTPSConnection(host, parts.port, timeout=timeout_s, context=context)


class _JoinedConnection(http.client.HTTPConnection):
    """A connection of the standard library's client that a gateway has joined."""

    def __init__(self, gateway: GatewayRoute, host: str, port: int, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._open = partial(gateway.open_blocking, host, port, timeout_s)

    def connect(self) -> None:
        """Have the gateway join it; raises what that answers."""
        self.sock = self._open()


def _notice_death(connection: socket.socket) -> None:
    """Enable TCP keep-alive, so that a machine that vanished is noticed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _fill(response: Any, into: memoryview) -> int:
    checksum = xxhash.xxh3_64()
    for begin in range(0, into.nbytes, _PIECE_NBYTES):
        piece = into[begin : begin + _PIECE_NBYTES]
        got = response.readinto(piece)
        if got != piece.nbytes:
            raise OSError(f"the connection ended after {begin + got} of {into.nbytes} bytes")
        checksum.update(piece)
    return checksum.intdigest()
