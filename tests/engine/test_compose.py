"""The compose file on a real engine: the chapter of README.md on containers, typed as it stands, and more.

Runs where a container engine answers (or where ``STOKER_TEST_ENGINE`` names a command that brings
one up); slow, because it builds the image. Uses ``docker compose`` (v2) where there is one, else
``docker-compose`` (v1), as ``make up`` does.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stoker.exceptions import StokerError
from stoker.jobs import JobSubmissionClient
from stoker_wire.messages.cluster import Node, NodeState
from stoker_wire.messages.control import Page
from tests.services import ReservedPort, until

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).resolve().parents[2]
BUILD_S, UP_S, JOB_S, DOWN_S = 1500, 300, 900, 120
(PAGE,) = re.findall(
    r"^## In containers\n+```sh\n(.*?)^```", (REPO / "README.md").read_text(), re.M | re.S
)
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks", "docs", "runs")
COMPOSES = [
    command
    for command in (("docker", "compose"), ("docker-compose",))
    if shutil.which(command[0])
    and subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0
]
pytestmark = [pytest.mark.engine, pytest.mark.timeout(BUILD_S + UP_S + JOB_S + DOWN_S)]


@dataclass
class Cluster:
    """A clone of the repository in which ``make up`` was typed, and a client of what it started."""

    clone: Path
    environ: dict[str, str]
    said: str = ""

    def run(self, line: str, timeout_s: float = UP_S) -> str:
        """Run a line in the clone; its output is the error's text if it fails."""
        done = subprocess.run(
            ["bash", "-c", f"set -e -o pipefail\n{line}"], cwd=self.clone, env=self.environ,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def containers(self, service: str) -> list[str]:
        """The ids of a service's containers."""
        return self.run(f"{shlex.join(COMPOSES[0])} ps -q {service}").split()

    @property
    def client(self) -> JobSubmissionClient:
        return JobSubmissionClient(self.environ["STOKER_ADDRESS"], self.environ["STOKER_TOKEN"])

    def nodes(self) -> dict[str, Node]:
        """The nodes that live, by URL; none while the gcs does not answer."""
        try:
            page = self.client.http.call("GET", "/v1/nodes", reply=Page[Node], timeout_s=5)
        except StokerError:
            return {}
        return {node.url: node for node in page.items if node.state is NodeState.ALIVE}


STAND_IN = """\
FROM postgres:15
RUN chmod 3777 /var/run/postgresql
ENTRYPOINT ["sh", "-euc", "export POSTGRES_PASSWORD=$(cat $POSTGRES_PASSWORD_FILE); exec /entrypoint.sh"]
"""


def images() -> dict[str, str]:
    """Return the image of a postgres:15 that is not the official one, with what that one has."""
    entrypoint = subprocess.run(
        ["docker", "image", "inspect", "-f", "{{json .Config.Entrypoint}}", "postgres:15"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    if entrypoint != '["/entrypoint.sh"]':
        return {}
    name = "stoker-test-postgres:15"
    subprocess.run(
        ["docker", "build", "-q", "-t", name, "-"], input=STAND_IN, text=True, check=True
    )
    return {"STOKER_POSTGRES_IMAGE": name}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """What the first lines of the page start."""
    if command := os.environ.get("STOKER_TEST_ENGINE"):
        subprocess.run(shlex.split(command), check=True, timeout=BUILD_S)
    assert COMPOSES, "the engine answers, but there is no docker compose"
    clone = tmp_path_factory.mktemp("engine") / "clone"
    shutil.copytree(REPO, clone, ignore=LEFT_OUT)
    shutil.copy(REPO / ".dockerignore", clone)
    port = ReservedPort()
    made = Cluster(
        clone,
        {
            **{k: v for k, v in os.environ.items() if not k.startswith("STOKER_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COMPOSE_PROJECT_NAME": f"stokertest{secrets.token_hex(4)}",
            "STOKER_PUBLISH_PORT": str(port),
            **images(),
        },
    )
    up, export, *_ = PAGE.splitlines()
    try:
        made.said = made.run(up, BUILD_S)
        shown = made.run(f"{export.replace('7600', str(port))}; env | grep '^STOKER_'")
        made.environ |= dict(line.split("=", 1) for line in shown.splitlines())
        until(lambda: len(made.nodes()) == 3, UP_S, "all nodelets have joined")
        yield made
    finally:
        compose = shlex.join(COMPOSES[0])
        with contextlib.suppress(AssertionError):
            sys.stdout.write(made.run(f"{compose} logs --tail 40", DOWN_S))
        made.run("make down", DOWN_S)
        made.run(f"{compose} down --volumes --timeout 5", DOWN_S)


@pytest.mark.parametrize("command", COMPOSES, ids=" ".join)
def test_each_compose_takes_the_file(command: tuple[str, ...]) -> None:
    shown = subprocess.run(
        [*command, "config"], cwd=REPO, capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "nodelet:" in shown.stdout


def test_the_page_says_what_make_says(cluster: Cluster) -> None:
    (export,) = (line for line in PAGE.splitlines() if line.startswith("export "))
    assert export in cluster.said.replace(cluster.environ["STOKER_PUBLISH_PORT"], "7600")
    assert "make down" in cluster.said
    assert (cluster.clone / ".secrets").stat().st_mode & 0o077 == 0
    secrets_ = {path.name: path.read_text() for path in (cluster.clone / ".secrets").iterdir()}
    assert len(set(secrets_.values())) == len(secrets_) == 3
    assert all(len(secret) == 48 for secret in secrets_.values())
    # What `docker inspect` and `ps` show has none of them.
    shown = cluster.run(
        f"docker inspect $({shlex.join(COMPOSES[0])} ps -q); "
        f"for one in $({shlex.join(COMPOSES[0])} ps -q); do docker top $one -eo pid,args || true; done"
    )
    assert "redis-server" in shown
    assert not [name for name, secret in secrets_.items() if secret in shown]


PROBE = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print(address, "reached")
    except OSError as error:
        print(address, "refused", type(error).__name__)
"""


def test_a_task_reaches_no_database_by_name_or_address(cluster: Cluster) -> None:
    stores = {"postgres": 5432, "redis": 6379}
    addresses = [f"{name}:{port}" for name, port in stores.items()]
    for name, port in stores.items():
        (container,) = cluster.containers(name)
        found = cluster.run(
            "docker inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "
            + container
        )
        addresses.append(f"{found.strip()}:{port}")
    probe = shlex.join(["python", "-c", PROBE, "gcs:7600", *addresses])
    said = cluster.run(f"stoker job submit -- {shlex.quote(probe)}", JOB_S)
    assert "gcs:7600 reached" in said
    assert [line for line in said.splitlines() if line.endswith("reached")] == ["gcs:7600 reached"]
    assert all(f"{address} refused" in said for address in addresses)


DRIVER = """
import stoker
info = stoker.init()

@stoker.remote
def double(x): return x * 2

@stoker.remote
class Reader:
    def nbytes(self, value): return len(value)

assert stoker.get([double.remote(i) for i in range(300)]) == [i * 2 for i in range(300)]
value = stoker.put(b"x" * 3_000_000)
assert stoker.get(Reader.remote().nbytes.remote(value)) == 3_000_000
assert stoker.get(double.remote(value)) == b"x" * 6_000_000
print("outside", info.node_id == "", flush=True)
"""


def test_a_program_on_the_host_joins_by_the_one_published_port(cluster: Cluster) -> None:
    said = cluster.run(shlex.join([sys.executable, "-c", DRIVER]), JOB_S)
    assert said.splitlines()[-1] == "outside True"


def test_no_container_can_change_its_image_or_take_all_memory(cluster: Cluster) -> None:
    for service in ("postgres", "redis", "gcs", "gateway", "scheduler", "nodelet"):
        container = cluster.containers(service)[0]
        done = cluster.run(f"docker exec {container} sh -c 'touch /usr/here 2>&1 || true'")
        assert "Read-only file system" in done
        limits = cluster.run(
            f"docker inspect -f '{{{{.HostConfig.Memory}}}} {{{{.HostConfig.PidsLimit}}}}' {container}"
        )
        memory, pids = map(int, limits.split())
        assert memory and pids > 0


def test_a_job_over_three_nodes_leaves_its_output(cluster: Cluster) -> None:
    nodes = cluster.nodes()
    assert len({node.hostname for node in nodes.values()}) == len(nodes) == 3
    (submit,) = (line for line in PAGE.splitlines() if line.startswith("stoker job submit"))
    cluster.run(
        submit.replace("--steps 20", "--steps 5 --batch 8 --block 32 --timeout-s 300"), JOB_S
    )
    assert list((cluster.clone / "results").rglob("checkpoint*"))
    # What was written outlives the node it was written on.
    (job,) = (one for one in cluster.client.list_jobs() if "train_gpt" in one.entrypoint)
    (container,) = (
        found
        for found in cluster.containers("nodelet")
        if next(n for n in nodes.values() if n.node_id == job.node_id).hostname in found
    )
    cluster.run(f"docker stop {container}")
    assert cluster.client.download_job_output(job.job_id, cluster.clone / "again")
    cluster.run(f"docker start {container}")
    until(lambda: len(cluster.nodes()) == 3, UP_S, "the node is back")


def test_a_nodelet_that_was_killed_comes_back(cluster: Cluster) -> None:
    before = {node.node_id for node in cluster.nodes().values()}
    container = cluster.containers("nodelet")[0]
    cluster.run(f"docker kill --signal KILL {container}; docker start {container}")
    until(
        lambda: len({node.node_id for node in cluster.nodes().values()} - before) == 1,
        UP_S,
        "it has registered anew, at its old address or another",
    )
    until(lambda: len(cluster.nodes()) == 3, UP_S, "three nodes live")


def test_a_second_node_of_the_same_name_is_refused_with_the_fix(cluster: Cluster) -> None:
    taken = next(iter(cluster.nodes())).split("//")[1].split(":")[0]
    compose = shlex.join(COMPOSES[0])
    one = cluster.run(
        f"{compose} run -d --no-deps -e STOKER_ADVERTISE_HOST={taken} nodelet"
    ).split()[-1]
    try:
        until(
            lambda: "set STOKER_ADVERTISE_HOST" in cluster.run(f"docker logs {one} 2>&1"),
            UP_S,
            "it says why it is refused",
        )
        assert len(cluster.nodes()) == 3
    finally:
        cluster.run(f"docker rm -f -v {one}")


def test_the_image_is_healthy_as_a_head_of_its_own(cluster: Cluster) -> None:
    one = cluster.run("docker run -d stoker:local stoker start --head --block").strip()
    try:
        until(
            lambda: cluster.run(
                f"docker inspect -f '{{{{.State.Health.Status}}}}' {one}"
            ).strip() == "healthy",
            UP_S,
            "its health check passes",
            interval_s=1.0,
        )  # fmt: skip
    finally:
        cluster.run(f"docker rm -f -v {one}")
