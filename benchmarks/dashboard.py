"""What the dashboard asks of the gcs with a long history: ``python -m benchmarks.dashboard``.

Fills a database with ``--tasks`` attempts (1,000,000) of 3 jobs, 20 functions and 64 workers on 200 nodes,
starts a gcs on it in a process of its own, and asks for what the views of the page ask for: the median
and the longest of several requests over loopback, in milliseconds. Then ``--events`` events a second are
made for some seconds, without and with an open page: what that page costs the gcs, and how long after
an event the page heard of it. Where there is Playwright and a Chromium, the page is loaded in it: how long
until its overview has figures and hears of changes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from benchmarks.history import cpu_seconds
from stoker_gcs.service import serve
from stoker_gcs.store.opening import open_store
from stoker_wire.data.spool import row_of
from stoker_wire.http.client.client import Client
from stoker_wire.messages.cluster import RegisteredNode, RegisterNode
from stoker_wire.messages.common import ErrorInfo
from stoker_wire.messages.control import KvPut, KvReply
from stoker_wire.messages.work import AttachDriver, Job, TaskRecord, TaskState
from stoker_wire.settings import Settings

TOKEN = "a-token-of-the-benchmark"
NODES, WORKERS, FUNCTIONS, JOBS = 200, 64, 20, 3
BATCH = 2000
SECONDS = 5.0


def attempts(count: int, jobs: list[str], before_s: float) -> list[list[TaskRecord]]:
    """Return attempts of an hour, in batches as they may have been reported."""
    dice = random.Random(1)
    step_s = 3600.0 / count
    batches = []
    for first in range(0, count, BATCH):
        batch = []
        for number in range(first, min(first + BATCH, count)):
            start_s = before_s - 3600.0 + number * step_s
            failed = dice.random() < 0.01
            batch.append(
                TaskRecord(
                    task_id=f"t_{dice.getrandbits(80):020x}",
                    attempt=0,
                    job_id=jobs[number % JOBS],
                    name=f"module.function_{dice.randrange(FUNCTIONS)}",
                    state=TaskState.FAILED if failed else TaskState.FINISHED,
                    node_id=f"n_{number % WORKERS}",
                    worker_id=f"w_{number % WORKERS}",
                    submitted_at_s=start_s - dice.expovariate(10),
                    started_at_s=start_s,
                    ended_at_s=start_s + dice.expovariate(1 / (WORKERS * step_s)),
                    error=ErrorInfo(code="task_failed", message="no") if failed else None,
                )
            )
        batches.append(batch)
    return batches


async def fill(url: str, count: int) -> list[str]:
    """Fill a database; return its jobs."""
    running = await serve(Settings(), token=TOKEN, database_url=url)
    async with Client(running.url, token=TOKEN, peer="benchmark") as client:
        jobs = []
        for number in range(JOBS):
            body = AttachDriver(pid=os.getpid() + number, hostname="here")
            jobs.append((await client.call("POST", "/v1/jobs/attach", body, reply=Job)).job_id)
        for number in range(NODES):
            node = RegisterNode(
                node_id=f"n_{number}",
                url=f"http://n-{number}.invalid:9",
                unix="",
                hostname=f"host-{number}",
                host_id=f"h_{number}",
                pid=1,
                resources={"CPU": 64.0},
            )
            await client.call("POST", "/v1/nodes", node, reply=RegisteredNode)
    await running.stop(1.0)
    store = open_store(url)
    await store.start()
    began = time.perf_counter()
    for batch in attempts(count, jobs, time.time()):
        await store.put_tasks([row_of(record) for record in batch])
    print(f"{count:,} attempts stored in {time.perf_counter() - began:.0f} s")
    await store.stop()
    return jobs


async def ask(session: aiohttp.ClientSession, path: str, times: int = 7) -> None:
    """Print how long a request takes."""
    taken = []
    size = 0
    for _ in range(times):
        began = time.perf_counter()
        async with session.get(path) as reply:
            size = len(await reply.read())
            assert reply.status == 200, (path, reply.status)
        taken.append(1e3 * (time.perf_counter() - began))
    shown = path.partition("?")[0] + ("?…" if "?" in path else "")
    print(
        f"{shown:42} median {statistics.median(taken):7.1f} ms, longest {max(taken):7.1f} ms, {size:,} B"
    )


async def listen(session: aiohttp.ClientSession, lags: list[float]) -> None:
    """Follow changes as a page does; note how old each is when it arrives."""
    headers = {"Accept": "text/event-stream"}
    async with session.get("/v1/changes", headers=headers) as reply:
        async for line in reply.content:
            if line.startswith(b"data: "):
                change = json.loads(line[6:])
                if change["payload"].get("kinds"):
                    lags.append(time.time() - change["at_s"])


async def make_events(client: Client, rate: float) -> int:
    """Make events for some seconds at a rate; return how many."""
    began, made = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < SECONDS:
        due = int(passed * rate) - made
        if due > 0:
            puts = [KvPut(key=f"k{i % 100}", value=b"v") for i in range(min(due, 200))]
            await asyncio.gather(
                *(client.call("POST", "/v1/kv/bench", put, reply=KvReply) for put in puts)
            )
            made += len(puts)
        await asyncio.sleep(0.005)
    return made


@contextlib.asynccontextmanager
async def page(session: aiohttp.ClientSession, lags: list[float]) -> AsyncIterator[None]:
    """A page that listens and asks for the overview at each change, as the page in a browser does."""
    listener = asyncio.create_task(listen(session, lags))

    async def refresh() -> None:
        seen = 0
        while True:
            if len(lags) > seen:
                seen = len(lags)
                async with session.get("/v1/overview") as reply:
                    await reply.read()
            await asyncio.sleep(1.0)

    refresher = asyncio.create_task(refresh())
    try:
        yield
    finally:
        for task in (listener, refresher):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def url_in(log: Path) -> str:
    """Return the URL that a service writes into its log when it listens."""
    async with asyncio.timeout(60.0):
        while True:
            for line in log.read_text().splitlines():  # noqa: ASYNC240  a short file
                if (found := json.loads(line)).get("url"):
                    return str(found["url"])
            await asyncio.sleep(0.05)


def load_page(url: str, times: int = 5) -> list[float]:
    """Load the page in a browser; return after how many milliseconds it was of use, each time."""
    from tests.e2e.http.dashboard._browser import Screen, chromium, interactive_ms

    with chromium() as browser:
        screen = Screen(browser, url).log_in(TOKEN)
        try:
            return [interactive_ms(screen) for _ in range(times)]
        finally:
            screen.close()


def show_loads(url: str) -> None:
    """Print how long the page takes in a browser, if there is one."""
    try:
        taken = load_page(url)
    except pytest.skip.Exception as reason:
        print(f"the page was not loaded in a browser: {reason}")
        return
    print(
        f"the page in Chromium is of use after {statistics.median(taken):.0f} ms in the median of "
        f"{len(taken)} loads, {max(taken):.0f} ms at most"
    )


async def measure(url: str, jobs: list[str], rate: float) -> None:
    """Start a gcs on the database, and ask it."""
    own = {"TOKEN": TOKEN, "DATABASE_URL": url, "LOG_FORMAT": "json", "HOST": "127.0.0.1"}
    environment = {**os.environ, **{f"STOKER_{name}": value for name, value in own.items()}}
    log = tempfile.NamedTemporaryFile()  # noqa: SIM115  as long as the process
    process = subprocess.Popen(  # noqa: ASYNC220  nothing else runs here yet
        [sys.executable, "-m", "stoker_gcs", "--port", "0"], env=environment, stderr=log
    )
    try:
        where = await url_in(Path(log.name))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(where, headers=headers) as session,
            Client(where, token=TOKEN, peer="benchmark") as client,
        ):
            job = f"job_id={jobs[0]}"
            now_s = time.time()
            for path in (
                "/",
                "/v1/overview",
                "/v1/tasks/summary",
                f"/v1/tasks/summary?{job}",
                "/v1/usage",
                "/v1/nodes?limit=200",
                "/v1/jobs",
                f"/v1/tasks?{job}&sort=created&order=desc",
                f"/v1/tasks?state=FAILED&{job}&sort=created&order=desc",
            ):
                await ask(session, path)
            await asyncio.to_thread(show_loads, where)
            everything = f"from_s={now_s - 4000}&to_s={now_s}"
            await ask(session, f"/v1/tasks/timeline?{everything}", times=3)
            await ask(session, f"/v1/tasks/timeline?{job}&{everything}", times=3)
            minute = f"from_s={now_s - 1800}&to_s={now_s - 1740}"
            await ask(session, f"/v1/tasks/timeline?{job}&{minute}", times=3)
            await ask(session, f"/v1/tasks/timeline?{minute}", times=3)
            costs = {False: [], True: []}
            lags: list[float] = []
            for turn in range(6):
                opened = bool(turn % 2)
                async with page(session, lags) if opened else contextlib.nullcontext():
                    before = cpu_seconds(process.pid)
                    made = await make_events(client, rate)
                    used = cpu_seconds(process.pid) - before
                costs[opened].append(used / SECONDS)
                name = "open" if opened else "none"
                rate_made, share = made / SECONDS, used / SECONDS
                print(f"page {name}: {rate_made:.0f} events/s, {share:.1%} of a core")
            closed, open_ = (statistics.median(costs[one]) for one in (False, True))
            print(f"an open page costs the gcs {open_ - closed:.1%} of a core")
            print(
                f"a page hears of the newest event after {1e3 * statistics.median(lags):.0f} ms "
                f"in the median, {1e3 * max(lags):.0f} ms at most, of {len(lags)} messages"
            )
    finally:
        process.kill()  # it may still look up the names of nodes that nobody has
        process.wait(10)


def main() -> None:
    """Fill and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=1_000_000, help="attempts in the history")
    parser.add_argument("--events", type=float, default=1000.0, help="events a second")
    parser.add_argument(
        "--database", type=Path, help="a folder to keep the database in, for a next run"
    )
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = given.database or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        url, notes = f"sqlite:///{folder / 'gcs.db'}", folder / "jobs.json"
        if not notes.exists():
            notes.write_text(json.dumps(asyncio.run(fill(url, given.tasks))))
        asyncio.run(measure(url, json.loads(notes.read_text()), given.events))


if __name__ == "__main__":
    main()
