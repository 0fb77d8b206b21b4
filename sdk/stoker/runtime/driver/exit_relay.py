"""A program that carries a driver's exit code to the gcs over TLS, which no C library writes at exit.

Started at exit by :mod:`stoker.runtime.driver.exit_code`, by its path, with the standard library alone
so that it is quick. Its standard input has a line of JSON (where to connect, the certificates, the head
of the request), then one byte: the exit code of the process that writes it, or nothing if it was killed.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys

_TIMEOUT_S = 10.0


def main() -> None:
    """Open the connection at once, which holds the driver's session, and pass the byte on."""
    said = json.loads(sys.stdin.buffer.readline())
    context = ssl.create_default_context(cafile=said["ca"] or None)
    if said["cert"]:
        context.load_cert_chain(said["cert"], said["key"] or None)
    with (
        socket.create_connection((said["host"], said["port"]), _TIMEOUT_S) as line,
        context.wrap_socket(line, server_hostname=said["host"]) as secured,
    ):
        secured.sendall(said["head"].encode())
        code = sys.stdin.buffer.read(1)
        if code:
            secured.sendall(code)
            secured.recv(1)


if __name__ == "__main__":
    main()
