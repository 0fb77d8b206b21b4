"""The Unix user who listens on a port of this machine: asked of the kernel before a token is sent there.

A port is anybody's while its service is down. TLS proves whom one speaks with; on loopback without it, the
kernel says as which user the other end runs (what SO_PEERCRED says of Unix sockets, by NETLINK_SOCK_DIAG,
sock_diag(7)). A port of another user than this process's, root or ``STOKER_SERVER_USER`` gets no token.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import pwd
import socket
import struct

from stoker_wire.errors import BadRequestError, ForeignPortError

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR = 2
_NLM_F_REQUEST = 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_ADDRESSES = struct.Struct("!HH16s16s")
_ANY_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
_UID = 4 + 48 + 12
"""Where ``idiag_uid`` is in an ``inet_diag_msg``: behind four bytes, the socket's id and three numbers."""
_ALL_STATES = 0xFFF
_REPLY_BYTES = 4096


class PlainConnection(http.client.HTTPConnection):
    """A connection of the standard library's client that sends nothing to a foreign user."""

    def connect(self) -> None:
        """Connect; ForeignPortError if another user listens there."""
        super().connect()
        check_port_owner(self.sock)


def check_port_owner(sock: socket.socket) -> None:
    """Raise ForeignPortError if the other end of a connection on loopback runs as a foreign user.

    Nothing is said of connections to other machines, nor where the kernel does not say: a port that is
    forwarded, by a container engine for one, has no listener here.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    try:
        peer, me = sock.getpeername(), sock.getsockname()
    except OSError:
        return  # it has ended: nothing can be sent
    if not _is_loopback(peer[0]):
        return
    trusted = {os.geteuid(), 0}
    if server_user := os.environ.get("STOKER_SERVER_USER", ""):
        trusted.add(uid_of(server_user))
    # The socket of a connection belongs to nobody (root, it says) until it is accepted, so the listener
    # counts; one that is accepted may be of whoever has listened before.
    for local_port in (0, me[1]):
        uid = _uid(sock.family, peer, (me[0], local_port))
        if uid is not None and uid not in trusted:
            name = str(uid)
            with contextlib.suppress(KeyError):
                name = f"{pwd.getpwuid(uid).pw_name} ({uid})"
            raise ForeignPortError(
                f"port {peer[1]} of this machine is held by another user, {name}: it gets no token\n"
                "if Stoker's services run as that user, set STOKER_SERVER_USER to it"
            )


def uid_of(user: str) -> int:
    """Return the uid of a user given by name or by number."""
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise BadRequestError(
            f"STOKER_SERVER_USER={user!r} is no user of this machine\nset it to a name or a uid",
            field="server_user",
        ) from None


def _uid(family: int, local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """Return the user of the socket between two addresses, or that listens; None if there is none."""
    addresses = _ADDRESSES.pack(
        local[1], remote[1], _packed(family, local[0]), _packed(family, remote[0])
    )
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + addresses + _ANY_COOKIE
    head = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.send(head + body)
            reply = kernel.recv(_REPLY_BYTES)
    except OSError:
        return None  # a kernel that does not say
    kind = _HEADER.unpack_from(reply)[1]
    if kind == _NLMSG_ERROR:
        code = -struct.unpack_from("=i", reply, _HEADER.size)[0]
        assert code != errno.EINVAL, "a malformed question to the kernel"
        return None
    return int(struct.unpack_from("=I", reply, _HEADER.size + _UID)[0])


def _packed(family: int, address: str) -> bytes:
    return socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1")
