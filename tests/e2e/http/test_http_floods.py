"""Floods from peers without a token: the head answers, and its node stays alive."""

from __future__ import annotations

import contextlib
import resource
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

import stoker
from tests.e2e._cluster import WAIT_S, embedded, head, http
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILES = resource.RLIMIT_NOFILE
IDLE = 1100
FEW = 256
DEAD_AFTER_S = 6.0


@stoker.remote
def answer() -> int:
    return 42


@pytest.fixture
def hard_limit() -> Iterator[int]:
    """The most files that this process may have open; it gives the head fewer, as a login shell does."""
    soft, hard = resource.getrlimit(FILES)
    if hard < 2 * IDLE:
        pytest.skip(f"the flood needs {2 * IDLE} open files, and {hard} are the most")
    resource.setrlimit(FILES, (512, hard))
    yield hard
    resource.setrlimit(FILES, (soft, hard))


def test_a_node_lives_on_while_strangers_hold_more_connections_than_it_has_files(
    tmp_path: Path, hard_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_DEAD_AFTER_S", str(DEAD_AFTER_S))
    monkeypatch.setenv("STOKER_SUSPECT_AFTER_S", "3")
    with contextlib.ExitStack() as open_:
        started = open_.enter_context(head(tmp_path, num_cpus=1))
        resource.setrlimit(FILES, (hard_limit, hard_limit))
        assert resource.prlimit(started.info.pid, FILES)[0] > 512
        resource.prlimit(started.info.pid, FILES, (1024, 1024))
        gcs = http(started)
        host = urlsplit(started.info.gcs_url)

        def beat_at_s() -> float:
            (node,) = gcs.call("GET", "/v1/nodes", reply=dict[str, Any])["items"]
            assert node["state"] == "ALIVE", node
            return float(node["heartbeat_at_s"])

        with contextlib.ExitStack() as idle:
            for _ in range(IDLE):
                peer = idle.enter_context(socket.create_connection((host.hostname, host.port)))
                peer.sendall(b"GET / HTTP/1.1\r\n")
            first = beat_at_s()
            until(lambda: beat_at_s() > first + DEAD_AFTER_S, 40, "heartbeats go on")


def test_a_driver_closes_the_oldest_of_too_many_connections_without_a_token(
    tmp_path: Path,
) -> None:
    with embedded(tmp_path, num_cpus=1), contextlib.ExitStack() as idle:
        unix = stoker.runtime.current.runtime().channels.address.unix
        peers = [idle.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(FEW + 10)]
        for peer in peers:
            peer.connect(unix)
            peer.settimeout(WAIT_S)
        assert [peer.recv(1) for peer in peers[:10]] == [b""] * 10
        peers[-1].sendall(b"\xff no HTTP\r\n\r\n")
        assert peers[-1].recv(12) == b"HTTP/1.0 400"
        assert stoker.get(answer.remote(), timeout=WAIT_S) == 42
