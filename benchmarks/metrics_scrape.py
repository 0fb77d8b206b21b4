"""How long a scrape of a gcs takes: ``python -m benchmarks.metrics_scrape``, with ``--nodes`` (200).

A gcs in a process of its own, on SQLite; nodes that register and send heartbeats, and are nothing else; tasks
of more functions than labels tell apart; a request to every route that reads. Then its ``/metrics`` is read
again and again, as Prometheus reads it. At most 20 ms are to pass.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from benchmarks.control_plane import TOKEN, Gcs
from stoker_gcs.api.routes import ROUTES
from stoker_wire.data.spool import RANKS, TaskFacts, TaskRow, frames_of, pack_facts
from stoker_wire.errors import StokerError
from stoker_wire.http.client.client import Client
from stoker_wire.http.server.routes import Route
from stoker_wire.messages.cluster import Heartbeat, RegisteredNode, RegisterNode
from stoker_wire.messages.work import TaskState

if TYPE_CHECKING:
    from collections.abc import Iterator

FUNCTIONS, PER_FUNCTION = 150, 100
LIMIT_S = 0.020
HEARTBEAT_S = 1.0


def rows() -> Iterator[TaskRow]:
    """Yield the ends of tasks of many functions."""
    now_s = time.time()
    for number in range(FUNCTIONS * PER_FUNCTION):
        facts = TaskFacts("", now_s - number % 60, now_s, now_s + number % 7, "w_1")
        state = TaskState.FAILED if number % 11 == 0 else TaskState.FINISHED
        name = f"package.module.function_{number % FUNCTIONS}"
        yield (
            f"t_{number:032x}", 0, "job_bench", state.value, name,
            "n_0000000000000001", "", RANKS[state], pack_facts(facts),
        )  # fmt: skip


async def register(client: Client, number: int) -> tuple[str, int]:
    """Have a node join; return its id and its incarnation."""
    node = RegisterNode(
        node_id=f"n_{number:016x}",
        url=f"http://127.0.0.1:{20_000 + number}",
        unix="",
        hostname=f"node-{number}",
        host_id=f"{number}",
        pid=1,
        resources={"CPU": 64.0, "memory": float(1 << 38)},
    )
    joined = await client.call("POST", "/v1/nodes", node, reply=RegisteredNode)
    return joined.node_id, joined.incarnation


async def beat(client: Client, nodes: list[tuple[str, int]]) -> None:
    """Send the heartbeats of all nodes, spread over each second, for ever."""
    while True:
        for node_id, incarnation in nodes:
            usage = {f"measure_{number}": 1.0 for number in range(20)}
            body = Heartbeat(incarnation=incarnation, usage=usage)
            with contextlib.suppress(StokerError):
                await client.call("POST", f"/v1/nodes/{node_id}/heartbeat", body, retry=False)
            await asyncio.sleep(HEARTBEAT_S / len(nodes) / 2)


async def ask_all(client: Client) -> int:
    """Send a request to each route that reads; return how many there are."""
    paths = {
        re.sub(r"\{[^}]*\}", "x", route.path)
        for route in ROUTES
        if isinstance(route, Route) and route.method == "GET"
    }
    for path in paths:
        with contextlib.suppress(StokerError):
            await client.call("GET", path, raw=True, retry=False, timeout_s=5.0)
    return len(paths)


def scrape(url: str, count: int) -> tuple[list[float], str]:
    """Read the metrics so often over one connection; return the times, and the last text."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    took: list[float] = []
    text = b""
    for _ in range(count):
        began_s = time.perf_counter()
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        text = connection.getresponse().read()
        took.append(time.perf_counter() - began_s)
        time.sleep(0.05)
    connection.close()
    return sorted(took), text.decode()


async def measure(url: str, nodes: int, count: int) -> float:
    """Fill a gcs, read its metrics, and print how long that takes; return the median."""
    async with Client(url, token=TOKEN, peer="benchmark") as client:
        joined = [await register(client, number) for number in range(nodes)]
        beats = asyncio.create_task(beat(client, joined))
        await client.call("POST", "/v1/tasks/spooled", frames_of(list(rows())), timeout_s=60.0)
        asked = await ask_all(client)
        took, text = await asyncio.to_thread(scrape, url, count)
        beats.cancel()
    samples = sum(not line.startswith("#") for line in text.splitlines())
    print(
        f"{nodes} nodes, {FUNCTIONS} functions, {asked} routes asked: {samples:,} samples in "
        f"{len(text):,} bytes\na scrape takes {statistics.median(took) * 1e3:.1f} ms in the median, "
        f"{took[int(0.95 * len(took))] * 1e3:.1f} ms at the 95th percentile, "
        f"{took[0] * 1e3:.1f} ms at best"
    )
    return statistics.median(took)


def main() -> int:
    """Measure; 1 if it takes too long."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metrics_scrape", description=__doc__
    )
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--scrapes", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gcs = Gcs(f"sqlite:///{folder}/gcs.sqlite3", Path(folder) / "gcs.log")
        gcs.start()
        try:
            gcs.until_ready()
            median_s = asyncio.run(measure(gcs.url, options.nodes, options.scrapes))
        finally:
            gcs.stop()
    return int(median_s > LIMIT_S)


if __name__ == "__main__":
    raise SystemExit(main())
