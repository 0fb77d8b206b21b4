"""The event loop of our processes."""

from __future__ import annotations

import subprocess
import sys

CONNECT = """
import os, socket
from stoker_wire.process.event_loop import new_loop

async def connect(loop, address):
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)

with socket.create_server(("127.0.0.1", 0)) as server:
    loop = new_loop()
    loop.run_until_complete(connect(loop, server.getsockname()))
    loop.close()
print(len(os.listdir("/proc/self/task")))
"""


def test_a_connection_to_an_address_starts_no_threads_to_resolve_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONNECT], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.strip() == "1"
