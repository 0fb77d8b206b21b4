"""The cluster of one cell of the matrix: services, stores and a driver as processes, and what holds them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from stoker.runtime.net.http import HttpClient
from stoker_migrations.command import upgrade
from tests.chaos._services import Apart
from tests.services import PostgresServer, RedisServer, mounted, until, with_own_shm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

REPOSITORY = Path(__file__).parents[3]
WAIT_S = 60.0
END_S = 200.0
"""A driver ends within this once it is told to: beyond, one of its calls is lost."""
SHM_BYTES = 256 << 20
DISK_BYTES = 128 << 20
DATABASE_DISK_BYTES = 192 << 20


@dataclass(frozen=True, slots=True)
class Needs:
    """What a fault needs of its cluster."""

    postgres: bool = False
    redis: bool = False
    small_shm: bool = False
    small_disk: bool = False
    """For sessions: logs, spool, spilled objects, SQLite."""
    small_database_disk: bool = False
    link: bool = False
    faults: str = ""
    replicas: int = 1
    """Of the gcs; more than one need PostgreSQL."""
    standby: bool = False
    """A second scheduler, which leads when the first does not."""


PLAIN = Needs()


class Driver:
    """A workload in a process of its own, and what it writes down."""

    def __init__(
        self, name: str, folder: Path, seed: int, command: Sequence[str], env: dict[str, str]
    ):
        folder.mkdir()
        self.folder = folder
        module = [
            sys.executable,
            "-m",
            "tests.chaos.matrix.workloads",
            name,
            str(folder),
            str(seed),
        ]
        self.log = folder / "driver.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *module],
                cwd=REPOSITORY,
                env={**env, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"},
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )

    @property
    def job_id(self) -> str:
        return (self.folder / "job").read_text()

    def progress(self) -> list[dict[str, Any]]:
        """What began and ended, so far."""
        path = self.folder / "progress.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def rounds(self) -> int:
        path = self.folder / "rounds"
        return int(path.read_text() or 0) if path.exists() else 0

    def goes_on(self, rounds: int, timeout_s: float) -> None:
        """Wait for so many more rounds."""
        before = self.rounds()

        def enough() -> bool:
            assert self.process.poll() is None, f"the driver ended:\n{self.said()}"
            return self.rounds() >= before + rounds

        until(enough, timeout_s, f"the driver does {rounds} more rounds", interval_s=0.05)

    def order(self, name: str, text: str = "") -> None:
        """Leave a file for it, whole."""
        part = self.folder / f"{name}.part"
        part.write_text(text)
        part.rename(self.folder / name)

    def end(self) -> dict[str, Any]:
        """Tell it to stop after its round; return what it found."""
        self.order("stop")
        try:
            code = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver does not end:\n{self.said()}") from None
        assert code == 0, f"the driver ended with {code}:\n{self.said()}"
        verdict: dict[str, Any] = json.loads((self.folder / "verdict.json").read_text())
        return verdict

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(30)


@dataclass(slots=True)
class World:
    """A running cluster. ``dice`` decide whom a fault meets."""

    folder: Path
    seed: int
    apart: Apart
    dice: random.Random
    driver_prefix: tuple[str, ...]
    drivers: list[Driver]
    postgres: PostgresServer | None
    redis: RedisServer | None
    shm: Path | None
    disk: Path | None
    link: str

    @property
    def driver(self) -> Driver:
        return self.drivers[-1]

    def start_driver(self, workload: str) -> Driver:
        env = {**self.apart.environ, "STOKER_ADDRESS": self.apart.address}
        folder = self.folder / f"driver{len(self.drivers)}"
        seed = self.seed + len(self.drivers)
        self.drivers.append(Driver(workload, folder, seed, self.driver_prefix, env))
        return self.driver

    def workers(self) -> list[int]:
        """The ids of the workers that have a lease, with what holds the interpreter out of it."""
        found = []
        for nodelet in self.apart.nodelets:
            client = HttpClient(nodelet.url, token=self.apart.token)
            page = client.call("GET", "/v1/workers", reply=dict[str, Any], query={"limit": 1000})
            found += [one["pid"] for one in page["items"] if one["lease_id"]]
        return [pid for pid in sorted(found) if psutil.pid_exists(pid)]

    def a_worker(self) -> int:
        """One of them, once there is one."""
        return self.dice.choice(until(self.workers, WAIT_S, "a worker has a lease"))

    def services(self) -> list[Any]:
        schedulers = (self.apart.scheduler, *self.apart.standbys)
        return [*self.apart.replicas, *schedulers, *self.apart.nodelets]

    def descriptors(self) -> dict[int, list[str]]:
        """What each service has open, by pid."""
        return {service.pid: _open_files(service.pid) for service in self.services()}


@contextlib.contextmanager
def world(folder: Path, seed: int, needs: Needs, *, nodelets: int = 2) -> Iterator[World]:
    """A cluster of two nodes that share nothing but the machine, with what a fault needs."""
    with contextlib.ExitStack() as held:
        place = folder / "c"
        place.mkdir(parents=True)
        given: dict[str, Any] = {"STOKER_SHARE_ARENAS": "0", "STOKER_FAULTS": needs.faults}
        given["replicas"] = needs.replicas
        postgres = redis = shm = disk = None
        prefix: tuple[str, ...] = ()
        if needs.postgres:
            postgres = PostgresServer()
            held.callback(postgres.remove)
            if needs.small_database_disk:
                held.enter_context(mounted(postgres.directory, DATABASE_DISK_BYTES))
            held.callback(postgres.stop)  # before its disk is gone
            postgres.start()
            given["database_url"] = postgres.url(postgres.create_database())
            upgrade(given["database_url"])
        if needs.redis:
            (folder / "redis").mkdir()
            redis = RedisServer(folder / "redis")
            held.callback(redis.stop)
            redis.start()
            given["redis_url"] = redis.url
        if needs.small_disk:
            disk = held.enter_context(mounted(place, DISK_BYTES))
        if needs.small_shm:
            shm, prefix = held.enter_context(_own_shm())
        link = ""
        if needs.link:
            link, host, inside = held.enter_context(_link())
            apart: Apart = _Linked(place, link, host, inside, STOKER_HOST=host, **given)
        else:
            apart = _Prefixed(place, prefix, **given)
        dice = random.Random(seed)
        made = World(folder, seed, apart, dice, prefix, [], postgres, redis, shm, disk, link)
        held.callback(apart.stop)
        held.callback(_end_drivers, made)
        for gcs in apart.replicas:
            gcs.start()
        apart.scheduler.start()
        if needs.standby:
            standby = apart.add_scheduler()
            until(lambda: standby.answers("/healthz"), WAIT_S, "the standby answers")
        for _ in range(nodelets):
            apart.add_nodelet(cpus=2)
        yield made


def _end_drivers(made: World) -> None:
    for driver in made.drivers:
        if driver.process.poll() is None:
            driver.kill()


class _Prefixed(Apart):
    """Services behind a command that puts them somewhere."""

    def __init__(self, folder: Path, prefix: tuple[str, ...], **given: Any) -> None:
        self._prefix = prefix
        super().__init__(folder, **given)

    def _service(self, name: str, module: str, *options: str) -> Any:
        made = super()._service(name, module, *options)
        made._command[:0] = self._prefix
        return made


class _Linked(Apart):
    """The second nodelet lives in a network namespace, and reaches all others by one link."""

    def __init__(self, folder: Path, namespace: str, host: str, inside: str, **given: Any) -> None:
        self._namespace, self._host, self._inside = namespace, host, inside
        super().__init__(folder, **given)

    def _service(self, name: str, module: str, *options: str) -> Any:
        made = super()._service(name, module, *options)
        host = self._host
        if name == "nodelet1":
            host = self._inside
            made._command[:0] = ["ip", "netns", "exec", self._namespace]
        made._command += ["--host", host]
        made.url = f"http://{host}:{made.port}"
        return made


@contextlib.contextmanager
def _own_shm() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A small /dev/shm: its path from here, and the command that runs something with it."""
    holder = subprocess.Popen([*with_own_shm(SHM_BYTES), "sleep", "infinity"])
    shm = Path(f"/proc/{holder.pid}/root/dev/shm")
    try:
        until(
            lambda: os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize == SHM_BYTES,
            WAIT_S,
            "the small /dev/shm is there",
        )
        nsenter = ("nsenter", "--target", str(holder.pid), "--mount", f"--wd={REPOSITORY}")
        yield shm, nsenter
    finally:
        holder.kill()
        holder.wait()


@contextlib.contextmanager
def _link() -> Iterator[tuple[str, str, str]]:
    """A network namespace and a link to it: its name (of the link's end here too), both addresses."""
    # Not a name that was: the kernel takes a namespace apart after "netns del" has returned.
    drawn = secrets.token_bytes(2)
    name, net = f"stk{drawn.hex()}", f"10.{drawn[0]}.{drawn[1]}"
    host, inside = f"{net}.1", f"{net}.2"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("addr", "add", f"{host}/30", "dev", name)
        _ip("link", "set", name, "up")
        for words in (f"addr add {inside}/30 dev eth0", "link set eth0 up", "link set lo up"):
            _ip("-n", name, *words.split())
        yield name, host, inside
    finally:
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def cut(link: str, *, heal: bool = False) -> None:
    """Unplug the link at its far end, or plug it in again: nobody is told, packets are lost."""
    _ip("-n", link, "link", "set", "eth0", "up" if heal else "down")


def link_is_possible() -> str:
    """Why there can be no network namespace here, or ''."""
    if os.geteuid():
        return "needs root"
    try:
        with _link():
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"no network namespace: {error}"


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(link.readlink().as_posix())
    # What is in shared memory may stay mapped, up to a bound, for the next that read or fill it.
    return [name for name in found if "/shm/stoker-" not in name or name.endswith("(deleted)")]


@contextlib.contextmanager
def frozen(pids: Sequence[int]) -> Iterator[None]:
    """They stand still meanwhile."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    process = psutil.Process(pid)
    return [pid, *(child.pid for child in process.children(recursive=True))]


def pause(seconds: float) -> None:
    """Let a fault last."""
    time.sleep(seconds)
