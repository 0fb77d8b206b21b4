"""A cluster of which the outside reaches one port: its addresses are not those of a network namespace.

``python -m tests.e2e.gateway._outside COMMAND...`` runs a command there, with the gateway's address and token
in ``STOKER_TEST_GATEWAY`` and ``STOKER_TEST_TOKEN``: the tests of the SDK, for one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stoker.launch import LocalCluster, spawn_local
from stoker.local import certificates
from stoker.runtime.net.http import HttpClient
from tests.e2e._cluster import session_root

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 40.0
REPOSITORY = Path(__file__).parents[3]
TOKEN = "the-token-of-a-cluster-behind-a-gateway"


@dataclass(frozen=True)
class Network:
    """A network namespace, and two addresses of this machine: one that it reaches, and one it does not."""

    namespace: str
    outer: str
    inner: str

    def command(self, *words: str) -> list[str]:
        """The command line that runs a program outside."""
        return ["ip", "netns", "exec", self.namespace, *words]


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Make one; skipped where that takes rights that this user has not."""
    if os.geteuid():
        pytest.skip("a network namespace needs root")
    drawn = secrets.token_bytes(3)
    name = f"stkgw{drawn.hex()}"
    made = Network(name, f"10.{drawn[0]}.{drawn[1]}.1", f"10.{drawn[0] ^ 0x80}.{drawn[2]}.1")
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no network namespace: {error}")
    try:
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        # The loopback interface has the inner one: no link leads there.
        _ip("addr", "add", f"{made.inner}/32", "dev", "lo")
        _ip("addr", "add", f"{made.outer}/30", "dev", name)
        _ip("link", "set", name, "up")
        _ip("-n", name, "addr", "add", f"{made.outer[:-1]}2/30", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield made
    finally:
        subprocess.run(["ip", "addr", "del", f"{made.inner}/32", "dev", "lo"], capture_output=True)
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Gateway:
    """The gateway of a cluster as a process, which can be killed and started again."""

    def __init__(self, network: Network, gcs_url: str, **env: str) -> None:
        self.network = network
        self._environ = {
            **os.environ,
            "STOKER_GCS_URL": gcs_url,
            "STOKER_ADVERTISE_HOST": network.inner,
            "STOKER_LOG_FORMAT": "json",
            **env,
        }
        self.port = 0
        self._scheme = gcs_url.partition(":")[0]
        self.process: subprocess.Popen[bytes]
        self.start()

    @property
    def url(self) -> str:
        """Its address from outside."""
        return f"{self._scheme}://{self.network.outer}:{self.port}"

    def start(self) -> None:
        """Start it, where it was before."""
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "stoker.gateway", "--host", "0.0.0.0"),
                *("--port", str(self.port), "--ready-fd", "1"),
            ],
            env=self._environ,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            said = pipe.readline().decode()
        assert said, f"the gateway ended with {self.process.wait()}"
        self.port = int(said.strip().rpartition(":")[2])

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End it in order; return its exit status."""
        self.process.terminate()
        return self.process.wait(20)


@dataclass
class Outside:
    """A cluster, its gateway, and the way to run a driver outside."""

    network: Network
    cluster: LocalCluster
    gateway: Gateway
    folder: Path

    def http(self) -> HttpClient:
        """A client of the gcs, inside."""
        return HttpClient(self.cluster.wait_ready().gcs_url, token=TOKEN)

    def environ(self, **env: str) -> dict[str, str]:
        """What a driver outside has."""
        inherited = {name: text for name, text in os.environ.items() if name != "STOKER_TOKEN_FILE"}
        return {
            **inherited,
            "STOKER_ADDRESS": self.gateway.url,
            "STOKER_TOKEN": TOKEN,
            "PYTHONPATH": str(REPOSITORY),
            **env,
        }

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Start a program outside."""
        return subprocess.Popen(
            self.network.command(*words),
            env=self.environ(**env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@contextlib.contextmanager
def outside(folder: Path, *, tls: Path | None = None, **offer: Any) -> Iterator[Outside]:
    """Start a cluster on the inner address, and a gateway on both; with the CA in ``tls`` by mutual TLS."""
    with network() as made, session_root(folder), pytest.MonkeyPatch.context() as patch:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(f"{TOKEN}\n")
        patch.setenv("STOKER_TOKEN_FILE", str(token))
        if tls is not None:
            certificates.issue(tls, "node", [made.inner, made.outer])
            files = {"CERT": "node.pem", "KEY": "node.key", "CA": "ca.pem"}
            patch.setenv("STOKER_TLS", "mutual")
            for name, file in files.items():
                patch.setenv(f"STOKER_TLS_{name}", str(tls / file))
        cluster = spawn_local(embedded=False, host=made.inner, **{"num_gpus": 0, **offer})
        try:
            gateway = Gateway(made, cluster.wait_ready().gcs_url)
            try:
                yield Outside(made, cluster, gateway, folder)
            finally:
                gateway.stop()
        finally:
            cluster.stop()


def main(command: list[str]) -> int:
    """Run a command outside of a cluster that the tests of the SDK can use."""
    env = {
        "STOKER_INFEASIBLE_GRACE_S": "0.5",
        "STOKER_LEASE_IDLE_S": "0.1",
        "PYTHONPATH": f"{REPOSITORY}",
    }
    os.environ.update(env)
    offer = {"num_cpus": 4, "num_gpus": 2, "resources": {"disk": 2}, "labels": {"zone": "north"}}
    with tempfile.TemporaryDirectory() as folder, outside(Path(folder), **offer) as made:
        environ = {
            **made.environ(),
            "STOKER_TEST_GATEWAY": made.gateway.url,
            "STOKER_TEST_TOKEN": TOKEN,
        }
        return subprocess.call(made.network.command(*command), env=environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
