"""A cluster of separate processes for fault tests: each can be killed, frozen and started again."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from stoker.runtime.net.http import HttpClient
from tests.services import ReservedPort, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READY_S = 60.0
FAST = {
    "STOKER_HEARTBEAT_S": "0.2",
    "STOKER_SUSPECT_AFTER_S": "1.5",
    "STOKER_DEAD_AFTER_S": "3.5",
    "STOKER_LEADER_TTL_S": "1.5",
    "STOKER_INFEASIBLE_GRACE_S": "5",
}


class Service:
    """One process that can be started anew with the same arguments, on the same port."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path):
        self.name = name
        self.port = ReservedPort()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [*command, "--port", str(self.port)]
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None

    def launch_by(self, launcher: tuple[str, ...]) -> None:
        """Be started by another module from now on: ``python -m LAUNCHER MODULE OPTIONS``."""
        self._command[2:2] = launcher

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, ready: bool = True) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        if ready:
            self.until_ready()

    def until_ready(self, timeout_s: float = READY_S) -> None:
        def answers() -> bool:
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"{self.name} ended:\n{self.said()}")
            return self.answers("/readyz")

        try:
            until(answers, timeout_s, f"{self.name} is ready", interval_s=0.03)
        except TimeoutError as error:
            raise AssertionError(f"{error}; it said:\n{self.said()}") from None

    def answers(self, path: str) -> bool:
        """Whether a GET succeeds."""
        request = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Bearer {self._env['STOKER_TOKEN']}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)

    def ended(self, timeout_s: float) -> int:
        """Wait until it has ended by itself; return its exit code."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} runs on; it said:\n{self.said()}") from None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> int:
        """SIGTERM; SIGKILL after half a minute. Returns the exit code."""
        if self._process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
        try:
            return self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)
            return -9


class Apart:
    """gcs, scheduler and nodelets as processes of their own."""

    def __init__(
        self,
        folder: Path,
        *,
        database_url: str = "",
        redis_url: str = "",
        replicas: int = 1,
        **settings: str,
    ) -> None:
        self.folder = folder
        self.token = secrets.token_urlsafe(16)
        self.environ = {
            **os.environ,
            **FAST,
            "STOKER_TOKEN": self.token,
            "STOKER_SESSION_ROOT": str(folder / "s"),
            **settings,
        }
        database_url = database_url or f"sqlite+aiosqlite:///{folder / 'gcs.sqlite3'}"
        options = ["--database-url", database_url]
        if redis_url:
            options += ["--redis-url", redis_url]
        self.gcs = self._service("gcs", "stoker_gcs", *options)
        self.replicas = [
            self.gcs,
            *(self._service(f"gcs{n}", "stoker_gcs", *options) for n in range(1, replicas)),
        ]
        self.address = ",".join(gcs.url for gcs in self.replicas)
        self.scheduler = self._service("scheduler", "stoker_scheduler", "--gcs-url", self.address)
        self.nodelets: list[Service] = []
        self.standbys: list[Service] = []
        self.launcher: tuple[str, ...] = ()
        """What stands before the module of each nodelet that is added from now on."""

    def _service(self, name: str, module: str, *options: str) -> Service:
        command = [sys.executable, "-m", module, *options]
        return Service(name, command, self.environ, self.folder / f"{name}.log")

    def add_scheduler(self) -> Service:
        """Start a standby."""
        made = self._service("standby", "stoker_scheduler", "--gcs-url", self.address)
        self.standbys.append(made)
        made.start(ready=False)
        return made

    def add_nodelet(self, *, cpus: int = 2, **labels: str) -> Service:
        number = len(self.nodelets)
        made = self._service(
            f"nodelet{number}",
            "stoker_nodelet",
            *("--gcs-url", self.address, "--num-cpus", str(cpus), "--num-gpus", "0"),
            *("--session-dir", str(self.folder / f"n{number}")),
            *("--labels", json.dumps({"name": f"n{number}"})),
        )
        made.launch_by(self.launcher)
        self.nodelets.append(made)
        made.start()
        return made

    @property
    def client(self) -> HttpClient:
        return HttpClient(self.address, token=self.token)

    def read(self, path: str) -> bytes:
        """The body of a GET, as it is."""
        headers = {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(self.gcs.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=40) as reply:
            body: bytes = reply.read()
        return body

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The nodes by their label."""
        page = self.client.call("GET", "/v1/nodes", reply=dict[str, Any], query={"limit": 100})
        return {node["labels"]["name"]: node for node in page["items"]}

    def attempts(self, job_id: str) -> dict[str, dict[int, dict[str, Any]]]:
        """The history of a job: the record of each attempt of each task."""
        found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        query: dict[str, Any] = {"job_id": job_id, "limit": 1000}
        while True:
            page = self.client.call("GET", "/v1/tasks", reply=dict[str, Any], query=query)
            for record in page["items"]:
                found[record["task_id"]][record["attempt"]] = record
            if not page["next_cursor"]:
                return dict(found)
            query["cursor"] = page["next_cursor"]

    def stop(self) -> None:
        for service in (*self.nodelets, *self.standbys, self.scheduler, *self.replicas):
            service.stop()


@contextlib.contextmanager
def apart(folder: Path, *, nodelets: int = 1, cpus: int = 2, **given: Any) -> Iterator[Apart]:
    """A running cluster of separate services, with URLs and settings of its own."""
    made = Apart(folder, **given)
    try:
        for gcs in made.replicas:
            gcs.start()
        made.scheduler.start()
        for _ in range(nodelets):
            made.add_nodelet(cpus=cpus)
        yield made
    finally:
        made.stop()
