"""The report of this process's exit code to the gcs; Python itself learns it only after its last hook.

``atexit`` functions are not told why the process ends: ``sys.exit(3)`` and ``raise SystemExit(3)`` look
like a success to them. So a request whose body is one byte is begun while Python still runs, and glibc
is asked (``on_exit(3)``) to write that byte: it calls ``fputc(status, file)`` as the process exits. A
process that is killed writes none, and its connection ends without it. Over TLS another process has the
connection (:mod:`stoker.runtime.driver.exit_relay`), and the byte goes to that through a pipe.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from stoker_wire.http.client.port_owner import check_port_owner
from stoker_wire.version import PROTOCOL_HEADER, PROTOCOL_TEXT

if TYPE_CHECKING:
    from stoker_wire.tls.files import TlsFiles

_CONNECT_S = 5.0
_UNBUFFERED = 2


def report_exit_code(url: str, *, token: str, job_id: str, message: str, tls: TlsFiles) -> bool:
    """Have the exit code of this process sent to the gcs at ``url``, with ``message`` for a failure.

    Return False where it cannot: without glibc, or when nobody answers. Call it at exit only.
    """
    parts = urlsplit(url)
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):
        return False
    libc.fdopen.restype = ctypes.c_void_p
    libc.setvbuf.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    libc.on_exit.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    query = f"?message={quote(message)}" if message else ""
    head = (
        f"POST /v1/jobs/{job_id}/exit{query} HTTP/1.1\r\n"
        f"Host: {parts.netloc}\r\nAuthorization: Bearer {token}\r\n"
        f"{PROTOCOL_HEADER}: {PROTOCOL_TEXT}\r\nStoker-Peer: driver\r\n"
        "Content-Type: application/octet-stream\r\nContent-Length: 1\r\n\r\n"
    )
    try:
        if parts.scheme == "https":
            fd = _relay(parts.hostname or "", parts.port or 443, head, tls)
        else:
            line = socket.create_connection((parts.hostname, parts.port or 80), timeout=_CONNECT_S)
            check_port_owner(line)
            line.sendall(head.encode())
            line.setblocking(True)
            fd = line.detach()
    except OSError:
        return False
    file = libc.fdopen(fd, b"w")
    if not file:
        return False
    libc.setvbuf(file, None, _UNBUFFERED, 0)
    return bool(libc.on_exit(ctypes.cast(libc.fputc, ctypes.c_void_p), file) == 0)


def _relay(host: str, port: int, head: str, tls: TlsFiles) -> int:
    """Start the process that has the connection; return the pipe to it."""
    program = Path(__file__).with_name("exit_relay.py")
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    process.returncode = 0  # it outlives this process; else Popen warns that its child still runs
    assert process.stdin is not None
    given = {"host": host, "port": port, "head": head}
    given |= {"cert": tls.cert, "key": tls.key, "ca": tls.ca}
    process.stdin.write(json.dumps(given).encode() + b"\n")
    process.stdin.flush()
    fd = os.dup(process.stdin.fileno())
    process.stdin.close()
    return fd
