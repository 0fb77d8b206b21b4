"""A cluster of two machines with STOKER_TLS=mutual: work, values and control, and no port in plain.

The second node has a ``/dev/shm`` of its own, so that its processes are of another machine to the others:
they are reached by TCP only, and objects are copied.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stoker.local import certificates
from stoker.local.sessions import find_running
from stoker_wire.http.auth import is_loopback
from stoker_wire.http.server.request_guard import outward_address
from tests.e2e import _cluster
from tests.services import until, with_own_shm

if TYPE_CHECKING:
    from pathlib import Path

    from stoker.launch import LocalCluster

TOKEN = "secret-of-the-test"

PROGRAM = """
import json, os, socket, ssl, sys
import psutil
import stoker

stoker.init()
FAR = {"far": 0.1}
BLOCK = os.urandom(40_000_000)

@stoker.remote(resources=FAR)
def size(value):
    return len(value), stoker.get_runtime_context().node_id

@stoker.remote(resources=FAR)
def make():
    return BLOCK[::-1]

@stoker.remote(resources=FAR)
class Counter:
    def __init__(self):
        self.count = 0
    def add(self, value):
        self.count += value
        return self.count

@stoker.remote(resources=FAR)
def nested(refs):
    return sum(stoker.get(refs))

@stoker.remote(num_cpus=0.1)
def small(number):
    return number

counter = Counter.remote()
sums = [counter.add.remote(n) for n in range(200)]
found = {
    "sent": stoker.get(size.remote(stoker.put(BLOCK)), timeout=60),
    "came": stoker.get(make.remote(), timeout=60) == BLOCK[::-1],
    "sums": stoker.get(sums, timeout=60)[-1],
    "inline": stoker.get(size.remote(bytes(90_000)), timeout=60)[0],
    "nested": stoker.get(nested.remote([small.remote(n) for n in range(20)]), timeout=60),
    "here": stoker.runtime.current.runtime().identity.node.node_id,
    "urls": [stoker.runtime.current.runtime().channels.address.url],
}
found["urls"] += [node["url"] for node in stoker.nodes()]
roots = [psutil.Process(int(pid)) for pid in sys.argv[1:]] + [psutil.Process()]
everyone = [one for root in roots for one in (root, *root.children(recursive=True))]
ports = {
    (one.laddr.ip, one.laddr.port)
    for process in everyone
    for one in process.net_connections("tcp")
    if one.status == psutil.CONN_LISTEN
}

def answers(host, port, context=None):
    with socket.create_connection((host if host != "0.0.0.0" else "127.0.0.1", port), 5) as line:
        try:
            if context is not None:
                line = context.wrap_socket(line)
            line.sendall(b"GET /healthz HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n")
            return bool(line.recv(100))
        except OSError:
            return False

anybody = ssl.create_default_context()
anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
ours = ssl.create_default_context(cafile=os.environ["STOKER_TLS_CA"])
ours.load_cert_chain(os.environ["STOKER_TLS_CERT"], os.environ["STOKER_TLS_KEY"])
ours.check_hostname = False
found["ports"] = len(ports)
found["plain"] = [port for port in ports if answers(*port)]
found["without a certificate"] = [port for port in ports if answers(*port, anybody)]
found["with ours"] = len([port for port in ports if answers(*port, ours)])
print(json.dumps(found), flush=True)
sys.exit(7)
"""


@pytest.mark.logs("TLS: a client")
def test_two_machines_work_with_mutual_tls_and_nothing_listens_in_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = outward_address()
    if is_loopback(host) or not host[0].isdigit():
        pytest.skip("this machine has no address but loopback")
    folder = tmp_path / "certs"
    certificates.init(folder, name="CA of the test")
    certificates.issue(folder, "node", [host])
    for name, value in {
        "STOKER_TLS": "mutual",
        "STOKER_TLS_CERT": str(folder / "node.pem"),
        "STOKER_TLS_KEY": str(folder / "node.key"),
        "STOKER_TLS_CA": str(folder / "ca.pem"),
        "STOKER_TOKEN": TOKEN,
        "STOKER_SESSION_ROOT": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    with _cluster.head(tmp_path, num_cpus=2, host=host) as head:
        url = head.info.gcs_url
        assert url.startswith(f"https://{host}:")
        found_here = find_running(tmp_path)
        assert found_here is not None, "`stoker status` finds it by itself"
        command = [sys.executable, "-m", "stoker.cli", "start", "--address", url, "--host", host]
        offer = ["--num-cpus", "2", "--num-gpus", "0", "--resources", '{"far": 4}']
        node = subprocess.Popen(
            [*with_own_shm(512 << 20), *command, *offer, "--block"],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            pids = [str(head.pid), str(node.pid)]
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, *pids],
                env=_cluster.environment(head),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 7, done.stderr
            ask_with_curl(url, folder)
            until(lambda: exit_code(head) == 7, 20, "the gcs knows the driver's exit code")
        finally:
            node.send_signal(signal.SIGINT)
            node.wait(30)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["sent"][0] == 40_000_000
    assert found["sent"][1] != found["here"]
    assert (found["came"], found["sums"], found["inline"]) == (True, sum(range(200)), 90_000)
    assert found["nested"] == sum(range(20))
    assert len(found["urls"]) == 3
    assert all(one.startswith(f"https://{host}:") for one in found["urls"])
    assert found["ports"] >= 6, "gcs, scheduler, two nodelets, the driver and a worker"
    assert found["plain"] == found["without a certificate"] == []
    assert found["with ours"] == found["ports"]


def exit_code(head: LocalCluster) -> int | None:
    [job] = _cluster.http(head).call("GET", "/v1/jobs", reply=dict[str, Any])["items"]
    return job.get("exit_code")


def ask_with_curl(url: str, folder: Path) -> None:
    """A page of the API, as docs/tls.md asks for it."""
    if shutil.which("curl") is None:
        return
    certificates.issue(folder, "me", client=True)
    own = {"--cacert": "ca.pem", "--cert": "me.pem", "--key": "me.key"}
    options = [part for name, file in own.items() for part in (name, str(folder / file))]
    said = subprocess.run(
        ["curl", "-sS", *options, "-H", f"Authorization: Bearer {TOKEN}", f"{url}/v1/nodes"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=dict(os.environ),
    )
    assert len(json.loads(said.stdout)["items"]) == 2, said.stderr
