"""The gateway that a head starts beside itself: it is there as long as the head, and again if it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import psutil
import pytest

from stoker.launch import spawn_local
from stoker.runtime.net.http import HttpClient
from stoker_wire.errors import StokerError
from stoker_wire.http.gateway.protocol import GATEWAY_PATH, GatewayInfo
from stoker_wire.http.server.request_guard import outward_address
from tests.e2e._cluster import driver, session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WAIT_S = 40.0
TOKEN = "the-token-of-a-head-with-a-gateway"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setenv("STOKER_TOKEN", TOKEN)
    with session_root(tmp_path):
        made = spawn_local(
            embedded=False, host=outward_address(), num_cpus=1, num_gpus=0, gateway_port=0
        )
        try:
            made.wait_ready()
            yield made
        finally:
            made.stop()


def gateway_of(cluster: LocalCluster) -> psutil.Process | None:
    for one in psutil.Process(cluster.pid).children():
        with contextlib.suppress(psutil.ZombieProcess):
            if "stoker.gateway" in one.cmdline():
                return one
    return None


def answers(url: str) -> bool:
    try:
        HttpClient(url, token=TOKEN).call("GET", GATEWAY_PATH, reply=GatewayInfo, timeout_s=1)
    except StokerError:
        return False
    return True


def test_it_is_started_again_and_ends_with_the_head(cluster: LocalCluster) -> None:
    url = cluster.info.gateway_url
    assert answers(url)
    first = gateway_of(cluster)
    assert first is not None
    assert "STOKER_TOKEN" not in first.environ(), "it has no secret"
    first.kill()

    def another() -> psutil.Process | None:
        found = gateway_of(cluster)
        return None if found is None or found.pid == first.pid else found

    second = until(another, WAIT_S, "there is another")
    until(lambda: answers(url), WAIT_S, "it answers where the first one did")
    os.kill(cluster.pid, signal.SIGKILL)
    until(lambda: not second.is_running(), WAIT_S, "it has ended")


def test_a_driver_joins_by_it(cluster: LocalCluster) -> None:
    script = """
        import stoker
        info = stoker.init()
        print(info.node_id == "", stoker.get(stoker.remote(lambda: 42).remote()))
    """
    with driver(cluster, script, STOKER_ADDRESS=cluster.info.gateway_url) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert out.splitlines()[-1:] == ["True 42"], err


def test_a_function_is_called_at_its_address(cluster: LocalCluster) -> None:
    script = """
        import sys, stoker
        from stoker.runtime.net.http import Content, HttpClient
        stoker.init()
        stoker.register(lambda x: x * x, "square")
        client = HttpClient(sys.argv[1], token=sys.argv[2])
        body = {"function": "square", "args": [4]}
        print(client.call("POST", "/v1/calls", body, reply=Content).data.decode())
    """
    words = [sys.executable, "-c", textwrap.dedent(script), cluster.info.gateway_url, TOKEN]
    own = {"STOKER_ADDRESS": cluster.info.gcs_url, "STOKER_TOKEN": TOKEN}
    done = subprocess.run(
        words, env={**os.environ, **own}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ['{"result":16}'], done.stderr
