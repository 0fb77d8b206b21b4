"""``python -m benchmarks.transfer``: objects between nodelets on loopback, and control calls meanwhile.

Real nodelet processes under a real gcs. Each figure stands beside a plain ``sendfile``/``recv_into``
loop between two processes in the same run, A B A B: on a shared machine only ratios mean anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from stoker_wire.arena import Arena, ObjectHead
from stoker_wire.errors import StokerError
from stoker_wire.http.client.client import Client
from stoker_wire.ids import Prefix, new_id
from stoker_wire.messages.cluster import Node
from stoker_wire.messages.control import Page
from stoker_wire.messages.objects import FreeObjects, ObjectInfo, PullObject, SealObjects

MIB = 1 << 20
START_S = 30.0
PULL_S = 300.0


class Nodelet:
    """A nodelet process: its arena as a runtime sees it, and a client of its API."""

    def __init__(self, node: Node, token: str) -> None:
        self.node = node
        self.arena = Arena(node.arena_dir)
        self.client = Client(node.url, token=token, peer="benchmark")

    async def put(self, nbytes: int) -> ObjectInfo:
        """Store an object of random bytes."""
        object_id = new_id(Prefix.OBJECT)
        piece = memoryview(os.urandom(MIB))
        head = ObjectHead("", "", 0.0, 0, (MIB,) * (nbytes // MIB))
        total = self.arena.write(object_id, head, b"", [piece] * (nbytes // MIB))
        made = ObjectInfo(object_id=object_id, nbytes=total)
        await self.client.call("POST", "/v1/objects", SealObjects(objects=(made,)))
        return made

    async def pull(self, made: ObjectInfo, home: Nodelet) -> float:
        """Bring an object here; return the seconds that it took."""
        wanted = PullObject(node_id=home.node.node_id, url=home.node.url, nbytes=made.nbytes)
        began = time.perf_counter()
        await self.client.call(
            "POST", f"/v1/objects/{made.object_id}/pull", wanted, timeout_s=PULL_S, retry=False
        )
        return time.perf_counter() - began

    async def free(self, made: ObjectInfo) -> None:
        """Free it; the home tells the nodes with copies."""
        await self.client.call(
            "POST", "/v1/objects/free", FreeObjects(object_ids=(made.object_id,))
        )

    async def holds(self, made: ObjectInfo) -> bool:
        """Whether it is in this node's list."""
        page = await self.client.call("GET", "/v1/objects", reply=Page[ObjectInfo])
        return any(one.object_id == made.object_id for one in page.items)


@contextlib.asynccontextmanager
async def cluster(folder: Path, count: int, arena_bytes: int) -> AsyncIterator[list[Nodelet]]:
    """A gcs and ``count`` nodelets, each a process of its own."""
    token = secrets.token_urlsafe(16)
    env = {
        **os.environ,
        "STOKER_TOKEN": token,
        "STOKER_ARENA_MAX_BYTES": str(arena_bytes),
        "STOKER_ARENA_WARM_BYTES": str(arena_bytes),
        "STOKER_LOG_LEVEL": "error",
        "STOKER_PRESTART_WORKERS": "0",
    }
    # Bound and not listening: the port stays ours until the gcs, which sets SO_REUSEADDR, listens.
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = holder.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    database = f"sqlite+aiosqlite:///{folder / 'gcs.sqlite3'}"
    processes = [_start(env, "stoker_gcs", "--database-url", database, "--port", str(port))]
    gcs = Client(url, token=token, peer="benchmark")
    try:
        for i in range(count):
            session = str(folder / f"n{i}")
            processes.append(
                _start(
                    env, "stoker_nodelet", "--gcs-url", url, "--session-dir", session,
                    "--num-gpus", "0",
                )
            )  # fmt: skip
        nodes: tuple[Node, ...] = ()
        deadline = time.monotonic() + START_S
        while len(nodes) < count:
            with contextlib.suppress(StokerError):
                nodes = (await gcs.call("GET", "/v1/nodes", reply=Page[Node])).items
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(nodes)} of {count} nodelets joined in {START_S:g} s")
            await asyncio.sleep(0.05)
        made = [Nodelet(node, token) for node in nodes]
        yield made
        for nodelet in made:
            await nodelet.client.close()
            nodelet.arena.close()
    finally:
        holder.close()
        await gcs.close()
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(20)


def _start(env: dict[str, str], module: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", module, *options], env=env)


class PlainLoop:
    """One process sends a warm file by ``sendfile``, this one fills a warm mapping by ``recv_into``."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.nbytes = nbytes
        self.cpu_s, self.runs = 0.0, 0
        self._source = self._file(folder / "source")
        self._into = mmap.mmap(self._file(folder / "into"), nbytes)
        self._into.write(bytes(nbytes))

    def _file(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, self.nbytes)
        return fd

    def run(self) -> float:
        """Move all bytes once; return the seconds, and add up ``cpu_s`` of both processes."""
        before = sum(os.times()[:4])
        with socket.create_server(("127.0.0.1", 0)) as server:
            pid = os.fork()
            if pid == 0:
                connection, _ = server.accept()
                sent = 0
                while sent < self.nbytes:
                    sent += os.sendfile(connection.fileno(), self._source, sent, 8 * MIB)
                connection.recv(1)
                os._exit(0)
            with (
                socket.create_connection(server.getsockname()) as line,
                memoryview(self._into) as into,
            ):
                began = time.perf_counter()
                got = 0
                while got < self.nbytes:
                    got += line.recv_into(into[got : got + 8 * MIB])
                seconds = time.perf_counter() - began
                line.send(b"x")
            os.waitpid(pid, 0)
        self.cpu_s += sum(os.times()[:4]) - before
        self.runs += 1
        return seconds


async def control_latency(nodelets: list[Nodelet], until: asyncio.Event) -> list[float]:
    """Call ``/healthz`` of each nodelet, each on a line of its own, until told; return seconds."""
    seconds: list[float] = []

    async def ask(nodelet: Nodelet) -> None:
        while not until.is_set():
            began = time.perf_counter()
            await nodelet.client.call("GET", "/healthz", raw=True)
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.002)

    await asyncio.gather(*(ask(nodelet) for nodelet in nodelets))
    return seconds


async def gone(made: ObjectInfo, nodelets: list[Nodelet]) -> None:
    """Wait until no nodelet has the object any more, so that its memory can be used again."""
    deadline = time.monotonic() + 30
    while any([await nodelet.holds(made) for nodelet in nodelets]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{made.object_id} was not freed everywhere within 30 s")
        await asyncio.sleep(0.01)


def cpu_seconds(nodelets: list[Nodelet]) -> list[float]:
    """User and system time of the nodelets so far."""
    tick = os.sysconf("SC_CLK_TCK")
    found = []
    for nodelet in nodelets:
        fields = Path(f"/proc/{nodelet.node.pid}/stat").read_text().rpartition(")")[2].split()
        found.append((int(fields[11]) + int(fields[12])) / tick)
    return found


async def measure(nbytes: int, rounds: int) -> None:
    """Run all cases and print the table."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as shared,
        tempfile.TemporaryDirectory() as disk,
    ):
        plain = PlainLoop(Path(shared), nbytes)
        plain.run()
        async with cluster(Path(disk), 5, nbytes * 2) as nodelets:
            home, first, *_ = nodelets
            rows = await _one_copy(home, first, nbytes, rounds, plain)
            rows += await _broadcast(home, nodelets[1:], nbytes, rounds)
            rows += await _control(home, first, nbytes, rounds)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


async def _one_copy(
    home: Nodelet, to: Nodelet, nbytes: int, rounds: int, plain: PlainLoop
) -> list[tuple[str, str]]:
    made = await home.put(nbytes)
    cold = await to.pull(made, home)
    await home.free(made)
    await gone(made, [home, to])
    plains, first, again = [], [], []
    before = cpu_seconds([home, to])
    for _ in range(rounds):
        plains.append(await asyncio.to_thread(plain.run))
        made = await home.put(nbytes)
        first.append(await to.pull(made, home))
        await to.free(made)  # the copy only: the home has its checksums now
        await gone(made, [to])
        plains.append(await asyncio.to_thread(plain.run))
        again.append(await to.pull(made, home))
        await home.free(made)
        await gone(made, [home, to])
    after = cpu_seconds([home, to])
    base = statistics.median(plains)
    used = [(b - a) / (2 * rounds) for a, b in zip(before, after, strict=True)]
    return [
        ("plain sendfile/recv_into loop", _speed(nbytes, base)),
        ("one copy, into memory never touched", _speed(nbytes, cold, base)),
        ("one copy", _speed(nbytes, statistics.median(first), base)),
        ("another copy (checksums known)", _speed(nbytes, statistics.median(again), base)),
        (
            "CPU seconds per copy, home + puller",
            f"{used[0]:.2f} + {used[1]:.2f}; of the plain loop {plain.cpu_s / plain.runs:.2f}",
        ),
    ]


async def _broadcast(
    home: Nodelet, others: list[Nodelet], nbytes: int, rounds: int
) -> list[tuple[str, str]]:
    singles, fans, used = [], [], []
    for i in range(rounds + 1):
        made = await home.put(nbytes)
        single = await others[0].pull(made, home)
        await home.free(made)
        await gone(made, [home, *others])
        made = await home.put(nbytes)
        before = cpu_seconds([home, *others])
        began = time.perf_counter()
        await asyncio.gather(*(nodelet.pull(made, home) for nodelet in others))
        fan = time.perf_counter() - began
        spent = [b - a for a, b in zip(before, cpu_seconds([home, *others]), strict=True)]
        await home.free(made)
        await gone(made, [home, *others])
        if i:  # the first round touches fresh memory
            singles.append(single)
            fans.append(fan)
            used.append(sum(spent))
    ratio = statistics.median(fans) / statistics.median(singles)
    busy = statistics.median(used) / statistics.median(fans)
    return [
        (
            f"to {len(others)} nodelets at once",
            (
                f"{statistics.median(fans):.2f} s, {ratio:.2f} x one copy "
                f"({busy:.2f} of {os.cpu_count()} CPUs busy in nodelets)"
            ),
        )
    ]


async def _control(home: Nodelet, to: Nodelet, nbytes: int, rounds: int) -> list[tuple[str, str]]:
    async def idle() -> list[float]:
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(1.0, done.set)
        return await control_latency([home, to], done)

    async def busy() -> list[float]:
        made = await home.put(nbytes)
        done = asyncio.Event()
        asking = asyncio.ensure_future(control_latency([home, to], done))
        await to.pull(made, home)
        done.set()
        seconds = await asking
        await home.free(made)
        await gone(made, [home, to])
        return seconds

    quiet = await idle()
    loaded = [one for _ in range(rounds) for one in await busy()]
    return [
        ("GET /healthz, idle", _quantiles(quiet)),
        ("GET /healthz, during the transfer", _quantiles(loaded)),
    ]


def _speed(nbytes: int, seconds: float, base: float = 0.0) -> str:
    share = f", {100 * base / seconds:.0f} % of the plain loop" if base else ""
    return f"{nbytes / seconds / 1e9:.2f} GB/s{share}"


def _quantiles(seconds: list[float]) -> str:
    ranked = sorted(seconds)
    p50, p99 = ranked[len(ranked) // 2], ranked[int(len(ranked) * 0.99)]
    return f"p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, n {len(ranked)}"


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer")
    parser.add_argument("--mib", type=int, default=1024, help="size of the object")
    parser.add_argument("--rounds", type=int, default=5)
    given: Any = parser.parse_args(argv)
    asyncio.run(measure(given.mib * MIB, given.rounds))


if __name__ == "__main__":
    main()
