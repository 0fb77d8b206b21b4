"""The gateway of a cluster with mutual TLS: one certificate of a person is all that a driver outside has."""

from __future__ import annotations

import socket
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from stoker.local import certificates
from tests.e2e.gateway._outside import Outside, outside

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 120.0
DRIVER = """
    import os
    import stoker
    stoker.init()

    @stoker.remote
    def reverse(value): return value[::-1]

    @stoker.remote
    class Reader:
        def read(self, refs): return sum(len(value) for value in stoker.get(refs))

    block = os.urandom(3_000_000)
    assert stoker.get(reverse.remote(block)) == block[::-1]
    assert stoker.get([reverse.remote(str(n)) for n in range(200)])[-1] == "991"
    mine = [stoker.put(block), stoker.put(b"small")]
    assert stoker.get(Reader.remote().read.remote([*mine, reverse.remote(block)])) == 6_000_005
    print("DONE", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    folder = tmp_path_factory.mktemp("gateway")
    certificates.init(folder, name="CA of the test")
    with outside(folder, tls=folder, num_cpus=2) as made:
        certificates.issue(folder, "me", client=True)
        yield made


def run(cluster: Outside, tmp_path: Path, **env: str) -> tuple[int, str, str]:
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    driver = cluster.start(sys.executable, "-u", str(script), **env)
    out, err = driver.communicate(timeout=LIMIT_S)
    return driver.returncode, out, err


def test_a_driver_with_a_persons_certificate_runs(cluster: Outside, tmp_path: Path) -> None:
    own = {
        "STOKER_TLS_CERT": str(cluster.folder / "me.pem"),
        "STOKER_TLS_KEY": str(cluster.folder / "me.key"),
    }
    status, out, err = run(cluster, tmp_path, **own)
    assert (status, out) == (0, "DONE\n"), err


def test_one_without_is_told_why(cluster: Outside, tmp_path: Path) -> None:
    status, _, err = run(cluster, tmp_path, STOKER_TLS_CERT="", STOKER_TLS_KEY="")
    assert status
    assert "TlsError" in err and "STOKER_TLS_CERT" in err


def test_the_port_speaks_nothing_but_tls(cluster: Outside) -> None:
    with socket.create_connection((cluster.network.outer, cluster.gateway.port), 20) as line:
        line.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in line.recv(100)
