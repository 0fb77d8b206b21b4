"""A cluster whose services listen on an address of the network, with a gateway, and its metrics."""

from __future__ import annotations

import contextlib
import os
import urllib.request
from typing import TYPE_CHECKING

from stoker.launch import spawn_local
from stoker_wire.http.server.request_guard import outward_address
from stoker_wire.messages.control import CreateToken, PersonRole, Token
from stoker_wire.messages.node_api import ScrapeTargets
from tests.e2e._cluster import http, run_driver, session_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WORK = """
    import time
    import stoker
    from stoker.exceptions import StokerError

    stoker.init(log_to_driver=False)

    @stoker.remote
    def square(x):
        return x * x

    @stoker.remote(max_retries=0)
    def wrong():
        raise ValueError

    @stoker.remote(num_gpus=1)
    def spin(seconds):
        began_s = time.process_time()
        while time.process_time() - began_s < seconds:
            pass

    assert stoker.get([square.remote(x) for x in range(20)]) == [x * x for x in range(20)]
    stoker.get(spin.remote(1.0))
    try:
        stoker.get(wrong.remote())
    except StokerError:
        print(stoker.get_runtime_context().job_id)
"""
"""Some tasks, one that fails, and one that takes a second of a CPU and has a GPU; prints the job's id."""


@contextlib.contextmanager
def monitored_cluster(folder: Path) -> Iterator[LocalCluster]:
    """Two CPUs and a fake GPU."""
    with session_root(folder):
        environ = {"STOKER_FAKE_GPUS": "1", "STOKER_TOKEN": f"the-token-of-{os.getpid()}-to-scrape"}
        made = spawn_local(
            environ=environ,
            embedded=False,
            host=outward_address(),
            num_cpus=2,
            num_gpus=1,
            gateway_port=0,
        )
        try:
            made.wait_ready()
            yield made
        finally:
            made.stop()


def work(cluster: LocalCluster) -> str:
    """Run the tasks; return the job's id."""
    done = run_driver(cluster, WORK)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def token_of(cluster: LocalCluster, role: str) -> str:
    """Return a token of a person."""
    body = CreateToken(name=f"the-{role}", role=PersonRole(role))
    return http(cluster).call("POST", "/v1/tokens", body, reply=Token).secret


def urls_of(cluster: LocalCluster) -> dict[str, str]:
    """Return the URL of each service: those that discovery has, and the gateway's."""
    found = http(cluster).call("GET", "/v1/metrics/targets", reply=list[ScrapeTargets])
    urls = {
        one.labels["service"]: f"{one.labels['__scheme__']}://{one.targets[0]}" for one in found
    }
    return {**urls, "gateway": cluster.info.gateway_url}


def read(url: str, token: str = "") -> str:
    """Return the metrics of a service."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        content: str = answer.read().decode()
    return content
