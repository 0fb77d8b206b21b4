"""Keepalive of TCP connections: a process that is busy is told from a machine that is gone.

The kernel of the peer answers, whatever its process does: one that holds the interpreter, is stopped or
is in a debugger keeps its connections.
"""

from __future__ import annotations

import socket

_IDLE_S = 10
_DEAD_S = 30
"""A peer whose kernel has not answered for so long is gone."""


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel close a TCP connection whose peer's machine is gone; others it leaves alone."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _IDLE_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_S * 1000)
