"""A local cluster per test module, and drivers of their own for tests that break one.

The tests of a module share its cluster, in any order: each leaves no task behind. A test that kills
a driver, counts processes or needs other sizes runs a script through ``driver``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from tests.e2e._flags import Flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 40.0
DRIVER_S = 90.0
REPOSITORY = Path(__file__).parents[2]
GRACE_S = "0.5"


class Cluster:
    """The module's cluster, as its driver (the test process) sees it."""

    def __init__(self, info: stoker.ClusterInfo) -> None:
        self.info = info

    @property
    def arena(self) -> Path:
        """The shared-memory folder of its only node."""
        (node,) = stoker.nodes()
        return Path(node["arena_dir"])

    def stored(self) -> set[str]:
        """The ids of the objects in shared memory."""
        return {p.name for p in self.arena.glob("o_*")}

    def is_idle(self) -> bool:
        """Whether no lease holds anything."""
        return bool(stoker.available_resources() == stoker.cluster_resources())

    def call(self, method: str, path: str, **query: Any) -> Any:
        """Ask the HTTP API."""
        from stoker.runtime.net.http import HttpClient

        client = HttpClient(self.info.address, token=self.info.token)
        return client.call(method, path, reply=dict, query=query or None)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four CPUs, two fake GPUs, two units of "disk", one label; or that behind a gateway."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SESSION_ROOT", str(tmp_path_factory.mktemp("s")))
        patch.setenv("STOKER_INFEASIBLE_GRACE_S", GRACE_S)
        patch.setenv("STOKER_LEASE_IDLE_S", "0.1")
        if gateway := os.environ.get("STOKER_TEST_GATEWAY"):
            info = stoker.init(gateway, token=os.environ["STOKER_TEST_TOKEN"], namespace="e2e")
        else:
            info = stoker.init(
                num_cpus=4,
                num_gpus=2,
                resources={"disk": 2},
                labels={"zone": "north"},
                namespace="e2e",
            )
        try:
            yield Cluster(info)
        finally:
            stoker.shutdown()


@pytest.fixture
def flags(tmp_path: Path) -> Flags:
    """Files by which a test and its tasks tell each other how far they are."""
    return Flags(tmp_path)


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run a script as a driver of its own, with a deadline; its process group dies with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(
        script: str, *args: str, timeout_s: float = DRIVER_S, **env: str
    ) -> subprocess.CompletedProcess[str]:
        process = start_driver(tmp_path, script, *args, **env)
        started.append(process)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def start_driver(folder: Path, script: str, *args: str, **env: str) -> subprocess.Popen[str]:
    """Start a script as a driver in a process group of its own."""
    path = folder / "driver_script.py"
    path.write_text(textwrap.dedent(script))
    variables = {
        **os.environ,
        "STOKER_SESSION_ROOT": str(folder / "sessions"),
        "STOKER_INFEASIBLE_GRACE_S": GRACE_S,
        "PYTHONPATH": str(REPOSITORY),
        **env,
    }
    return subprocess.Popen(
        [sys.executable, "-u", str(path), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=variables,
        start_new_session=True,
    )


def get(refs: Any, timeout: float = WAIT_S) -> Any:
    """``stoker.get`` with a deadline, so that a hang says what it waits for."""
    return stoker.get(refs, timeout=timeout)
