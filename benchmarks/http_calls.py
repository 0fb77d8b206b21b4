"""``python -m benchmarks.http_calls``: a call of a function and of an actor's method by HTTP, on loopback.

Each is timed alone on one connection (the median, and the 99th percentile) and over 16 connections at once.
Beside it, in turn, a plain handler of aiohttp that answers the same JSON from a process of its own: the cost
of HTTP in Python by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

from benchmarks.results import HERE, Row, append, show

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 3
CONNECTIONS = 16
ALONE = 1000
TOGETHER_S = 3.0
WARM_UP = 200
TOKEN = "the-token-of-a-benchmark-of-calls"
FUNCTION = b'{"function":"square","namespace":"team","args":[12]}'
METHOD = b'{"actor":"squares","namespace":"team","method":"square","args":[12]}'
PLAIN = """
from aiohttp import web

async def square(request):
    x = (await request.json())["args"][0]
    return web.json_response({"result": x * x})

async def main():
    app = web.Application()
    app.router.add_post("/v1/calls", square)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

import asyncio
asyncio.run(main())
"""


class Connection:
    """One kept connection with as little of a client as there can be, so that the server is what is timed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def call(self, body: bytes) -> None:
        """Make one call; fails unless the answer is right."""
        head = (
            f"POST /v1/calls HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(answer.partition("content-length:")[2].partition("\r\n")[0])
        result = await self._reader.readexactly(length)
        assert b"144" in result, (answer, result)

    def close(self) -> None:
        """Close it."""
        self._writer.close()


async def measure(port: int, body: bytes) -> dict[str, float]:
    """Return the figures of one server."""
    alone = await Connection.open(port)
    for _ in range(WARM_UP):
        await alone.call(body)
    took = []
    for _ in range(ALONE):
        began = time.perf_counter()
        await alone.call(body)
        took.append(time.perf_counter() - began)
    alone.close()
    connections = [await Connection.open(port) for _ in range(CONNECTIONS)]
    calls, until = 0, time.perf_counter() + TOGETHER_S

    async def keep_calling(one: Connection) -> None:
        nonlocal calls
        while time.perf_counter() < until:
            await one.call(body)
            calls += 1

    began = time.perf_counter()
    await asyncio.gather(*(keep_calling(one) for one in connections))
    rate = calls / (time.perf_counter() - began)
    for one in connections:
        one.close()
    took.sort()
    return {
        "p50": statistics.median(took) * 1e3,
        "p99": took[int(len(took) * 0.99)] * 1e3,
        f"rate_{CONNECTIONS}": rate,
    }


def stoker_round() -> dict[str, float]:
    """Start a head with a gateway, register a function, start an actor, and measure both."""
    import stoker
    from stoker.launch import spawn_local

    with tempfile.TemporaryDirectory() as folder:
        own = {"STOKER_TOKEN": TOKEN, "STOKER_SESSION_ROOT": folder}
        cluster = spawn_local(environ=own, embedded=False, num_cpus=2, num_gpus=0, gateway_port=0)
        try:
            info = cluster.wait_ready()
            stoker.init(info.gcs_url, token=TOKEN, namespace="team", log_to_driver=False)
            stoker.register(lambda x: x * x, "square")

            @stoker.remote
            class Squares:
                def square(self, x: int) -> int:
                    return x * x

            actor = Squares.options(name="squares").remote()  # type: ignore[attr-defined]
            stoker.get(actor.square.remote(1))
            port = int(info.gateway_url.rpartition(":")[2])
            found = {
                f"{kind}_{case}": value
                for kind, body in (("task", FUNCTION), ("actor", METHOD))
                for case, value in asyncio.run(measure(port, body)).items()
            }
            stoker.shutdown()
            return found
        finally:
            cluster.stop()


def plain_round() -> dict[str, float]:
    """Measure the plain handler."""
    command = [sys.executable, "-c", PLAIN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            found = asyncio.run(measure(port, FUNCTION))
        finally:
            process.kill()
    return {f"{kind}_{case}": value for kind in ("task", "actor") for case, value in found.items()}


def main() -> None:
    """Measure in turn, print medians, and append them to the table of results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_calls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    import aiohttp

    from stoker_wire.version import VERSION

    sides: dict[str, tuple[str, Callable[[], dict[str, float]]]] = {
        "stoker": (VERSION, stoker_round),
        "aiohttp": (aiohttp.__version__, plain_round),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(given.rounds):
        for name, (_, measure_round) in sides.items():
            rounds[name].append(measure_round())
    for name, (version, _) in sides.items():
        rows = [
            Row(
                f"http_call_{case}",
                statistics.median(one[case] for one in rounds[name]),
                "1/s" if "rate" in case else "ms",
            )
            for case in rounds[name][0]
        ]
        print(name)
        show(rows)
        append(HERE / "results.csv", name, version, rows)


if __name__ == "__main__":
    main()
