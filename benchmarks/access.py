"""``python -m benchmarks.access``: what roles, per-job tokens and audit cost a request of the HTTP API.

A gcs in this process, asked over loopback by a job with its token, one request after the other; and the steps
that exist for access alone (site, signature, role, state of the job, owner, author for the audit), called
with what such a request gives them. Their share is an upper bound: some check of a token there would be
anyway. Calls of tasks and actors go over channels, whose tokens are checked once, when they open.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.results import HERE, Row, append, show
from stoker_gcs.service import Running, serve
from stoker_migrations.command import upgrade
from stoker_wire.http.client.client import Client
from stoker_wire.http.principals import AUTHOR, author_of
from stoker_wire.http.server.request_guard import check_role
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.work import AttachDriver, Job
from stoker_wire.settings import Settings
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stoker_wire.http.server.request import BoundRoute

ROUNDS = 9
REQUESTS = 300
CHECKS = 3000
_KEY = "/v1/kv/{namespace}/{key:.+}"
MOST = 0.02
"""The share of a request that access may take."""


class Case(NamedTuple):
    """A request that is sent often."""

    name: str
    method: str
    route: str
    params: dict[str, str]
    body: bytes | None = None

    @property
    def path(self) -> str:
        """The path with the names in it."""
        return self.route.replace(":.+", "").format(**self.params)


CASES = (
    Case("kv put", "PUT", _KEY, {"namespace": "bench", "key": "k"}, b"v"),
    Case("kv get", "GET", _KEY, {"namespace": "bench", "key": "k"}),
    Case("list jobs", "GET", "/v1/jobs", {}),
)


async def measured(folder: Path, rounds: int) -> list[Row]:
    """Return the time of each request, that of its checks, and their share."""
    url, signer = f"sqlite+aiosqlite:///{folder}/gcs.db", TokenSigner("s" * 32)
    await asyncio.to_thread(upgrade, url)
    running = await serve(Settings(), token=signer, database_url=url)
    try:
        async with Client(running.url, token=signer.service("admin", "bench"), peer="b") as admin:
            body = AttachDriver(pid=1, hostname="here", namespace="bench")
            job = await admin.call("POST", "/v1/jobs/attach", body, reply=Job)
        token = signer.job(job.job_id)
        rows = []
        async with Client(running.url, token=token, peer="job") as client:
            for case in CASES:
                rows += await _measure(running, client, token, case, rounds)
        return rows
    finally:
        await running.stop(0.5)


async def _measure(
    running: Running, client: Client, token: str, case: Case, rounds: int
) -> list[Row]:
    async def request() -> None:
        await client.call(case.method, case.path, case.body)

    check = _checks_of(running, token, case)
    requests, checks = [], []
    for _ in range(rounds):  # in turn: a shared machine has faster and slower moments
        requests.append(await _us(request, REQUESTS))
        checks.append(await _us(check, CHECKS))
    request_us, check_us = statistics.median(requests), statistics.median(checks)
    name = f"access_{case.name.replace(' ', '_')}"
    return [
        Row(f"{name}_request", request_us, "us"),
        Row(f"{name}_checks", check_us, "us"),
        Row(f"{name}_share", check_us / request_us, ""),
    ]


def _checks_of(running: Running, token: str, case: Case) -> Callable[[], Awaitable[None]]:
    """What the dispatcher does for a request because there are roles, tokens of jobs, and an audit."""
    guard = running._service.guard
    (route,) = (one for one in running._service.dispatcher.routes.values() if _is_of(one, case))
    headers = {
        "Host": running.url.removeprefix("http://"),
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/msgpack",
    }

    async def check() -> None:
        principal = await guard.check(headers, case.path)
        check_role(principal, route.roles, f"{route.method} {route.path}")
        AUTHOR.set(author_of(principal, "127.0.0.1") if case.method != "GET" else None)
        await guard.admit(principal, route, case.params)

    return check


def _is_of(route: BoundRoute, case: Case) -> bool:
    return (route.method, route.path) == (case.method, case.route)


async def _us(do: Callable[[], Awaitable[None]], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        await do()
    return (time.perf_counter() - began) / count * 1e6


def main() -> int:
    """Run it; return 1 if access takes more than it may."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--csv", type=Path, default=HERE / "results.csv")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measured(Path(folder), given.rounds))
    show(rows)
    append(given.csv, "stoker", VERSION, rows)
    return int(any(row.case.endswith("_share") and row.value > MOST for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
