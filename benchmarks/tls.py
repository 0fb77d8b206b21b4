"""``python -m benchmarks.tls``: what mutual TLS costs, on loopback: control calls, the data path, transfers.

Plain beside mutual TLS in turn, A B A B, in one run: on a shared machine only ratios mean anything.
A head of each kind, as ``stoker start --head`` makes it, for calls over a connection that is open, calls
that open one each, and ranges of an object; two processes of their own for frames of the data path.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from benchmarks.results import HERE, Row, append, show
from benchmarks.transfer import Nodelet
from stoker.launch import LocalCluster, spawn_local
from stoker.local import certificates
from stoker.runtime.net.http import HttpClient
from stoker_wire.data.channel import PATH, Channel, accept, connect
from stoker_wire.data.range_reader import CHUNK_NBYTES, RangeReader
from stoker_wire.http.client.client import Client
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Inline, Ping, Pong, Resolved
from stoker_wire.settings import Settings
from stoker_wire.tls.contexts import server_context
from stoker_wire.tls.files import TlsFiles, files_of
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

MODES = ("off", "mutual")
ROUNDS = 9
OBJECT_NBYTES = 8 * CHUNK_NBYTES
FRAME_NBYTES = 16 << 20
_HOST = "127.0.0.1"

Case = Callable[[], float]
"""One measurement: the figure of one round."""


def variables(folder: Path, mode: str) -> dict[str, str]:
    """Return the settings of a process in a mode, as the environment has them."""
    if mode == "off":
        return {"STOKER_TLS": mode}
    files = {"CERT": "node.pem", "KEY": "node.key", "CA": "ca.pem"}
    return {"STOKER_TLS": mode} | {
        f"STOKER_TLS_{name}": str(folder / file) for name, file in files.items()
    }


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for a while, as those who read the environment by themselves need."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- control calls and transfers -----------------------------------------------------------------------


def call_ms(runner: asyncio.Runner, client: Client, count: int) -> float:
    """Return the median time of a call over an open connection."""

    async def calls() -> float:
        took = []
        await client.call("GET", "/readyz")
        for _ in range(count):
            began = time.perf_counter()
            await client.call("GET", "/readyz")
            took.append(time.perf_counter() - began)
        return statistics.median(took) * 1e3

    return runner.run(calls())


def connecting_call_ms(url: str, values: dict[str, str], count: int) -> float:
    """Return the median time of a call that opens its connection, as each of the command line does."""
    took = []
    with environment(values):
        client = HttpClient(url, token="")
        for _ in range(count):
            began = time.perf_counter()
            client.call("GET", "/healthz", reply=dict)
            took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


def transfer_mb_s(reader: RangeReader, object_id: str, nbytes: int, into: memoryview) -> float:
    """Return the rate at which a nodelet's object arrives in this process's memory, by one connection."""
    reader.close()  # that of the last round may be too old
    began = time.perf_counter()
    for begin in range(0, nbytes, CHUNK_NBYTES):
        reader.read(object_id, begin, into[begin : min(begin + CHUNK_NBYTES, nbytes)])
    return nbytes / 1e6 / (time.perf_counter() - began)


# -- the data path -------------------------------------------------------------------------------------


def serve_channels(pipe: Connection, files: TlsFiles) -> None:
    """Answer each ping of a channel, and take what else comes; the process of the other end."""

    def answer(channel: Channel, messages: list[Any]) -> None:
        for message in messages:
            channel.post(Pong(message.number) if isinstance(message, Ping) else Pong(-1))

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def take(request: web.Request) -> web.StreamResponse:
            channel = await accept(request, me=Address("w_1", "", "", "", ""), job_id="j_1")
            assert channel is not None
            channel.start(answer, lambda _: loop.stop(), loop.call_soon)
            return web.Response()

        app = web.Application()
        app.router.add_get(PATH, take)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        context = server_context(files) if files.is_on else None
        site = web.TCPSite(runner, _HOST, 0, ssl_context=context)
        await site.start()
        scheme = "https" if files.is_on else "http"
        pipe.send(f"{scheme}://{_HOST}:{site.port}")
        await asyncio.Event().wait()

    with contextlib.suppress(RuntimeError):  # the loop was stopped, as the channel has ended
        asyncio.run(main())


class DataPath:
    """One end of a channel to another process, and the answers that it waits for."""

    def __init__(self, runner: asyncio.Runner, files: TlsFiles) -> None:
        self._runner = runner
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=serve_channels, args=(theirs, files), daemon=True)
        self._process.start()
        self._answered = asyncio.Event()
        self._left = 0
        self._channel = runner.run(self._open(ours.recv(), files))

    async def _open(self, url: str, files: TlsFiles) -> Channel:
        peer, me = Address("w_1", "", "", "", url), Address("d_1", "", "", "", "")
        channel = await connect(peer, path="", me=me, job_id="j_1", authorization="", tls=files)
        channel.start(self._take, lambda _: None, asyncio.get_running_loop().call_soon)
        return channel

    def _take(self, _: Channel, messages: list[Any]) -> None:
        self._left -= len(messages)
        if self._left <= 0:
            self._answered.set()

    async def _sent(self, messages: list[Any]) -> None:
        self._left = len(messages)
        self._answered.clear()
        for message in messages:
            self._channel.post(message)
        await self._answered.wait()

    def round_trip_us(self, count: int) -> float:
        """Return the median time of a small message and its answer."""

        async def trips() -> float:
            took = []
            for number in range(count):
                began = time.perf_counter()
                await self._sent([Ping(number)])
                took.append(time.perf_counter() - began)
            return statistics.median(took) * 1e6

        return self._runner.run(trips())

    def burst_us(self, count: int) -> float:
        """Return the time of each of many messages that are sent at once, and their answers."""

        async def burst() -> float:
            began = time.perf_counter()
            await self._sent([Ping(number) for number in range(count)])
            return (time.perf_counter() - began) / count * 1e6

        return self._runner.run(burst())

    def large_mb_s(self, count: int) -> float:
        """Return the rate of large values inside messages."""
        value = Resolved("o_1", Inline(bytes(FRAME_NBYTES)))

        async def stream() -> float:
            began = time.perf_counter()
            for _ in range(count):
                await self._sent([value])
            return count * FRAME_NBYTES / 1e6 / (time.perf_counter() - began)

        return self._runner.run(stream())

    def close(self) -> None:
        """End the channel, and with it the other process."""
        self._runner.run(self._channel.close())
        self._process.join(5)
        self._process.kill()


# -- the run -------------------------------------------------------------------------------------------


def measure(
    folder: Path, quick: bool, stack: contextlib.ExitStack
) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each case and mode, one per round."""
    part = 10 if quick else 1
    runner = stack.enter_context(asyncio.Runner())
    cases: dict[str, dict[str, Case]] = {}
    for mode in MODES:
        values = variables(folder, mode)
        settings = Settings.from_env({**values, "STOKER_TLS": mode})
        files = files_of(settings)
        head: LocalCluster = spawn_local(embedded=False, num_cpus=1, num_gpus=0, environ=values)
        stack.callback(head.stop)
        head.wait_ready()
        info = head.info
        client = Client(info.gcs_url, token=info.token, peer="benchmark", settings=settings)
        stack.callback(lambda it=client: runner.run(it.close()))
        nodelet = _Nodelet(info.nodelet_url, info.arena_dir, info.token, settings)
        stack.callback(lambda it=nodelet: runner.run(it.client.close()))
        made = runner.run(nodelet.put(OBJECT_NBYTES // part))
        reader = RangeReader(info.nodelet_url, token=info.token, peer="benchmark", tls=files)
        stack.callback(reader.close)
        into = memoryview(bytearray(made.nbytes))
        path = DataPath(runner, files)
        stack.callback(path.close)
        of_mode: dict[str, Case] = {
            "control_call_ms": lambda it=client: call_ms(runner, it, 1000 // part),
            "control_call_and_connection_ms": lambda url=info.gcs_url, env=values: (
                connecting_call_ms(url, env, 200 // part)
            ),
            "message_and_answer_us": lambda it=path: it.round_trip_us(3000 // part),
            "message_of_a_burst_us": lambda it=path: it.burst_us(20_000 // part),
            "large_messages_mb_s": lambda it=path: it.large_mb_s(20 // part),
            "transfer_mb_s": lambda it=reader, one=made, to=into: transfer_mb_s(
                it, one.object_id, one.nbytes, to
            ),
        }
        for case, run in of_mode.items():
            run()  # once, so that both kinds have all that they open
            cases.setdefault(case, {})[mode] = run
    figures: dict[str, dict[str, list[float]]] = {}
    for case, runs in cases.items():
        for _ in range(2 if quick else ROUNDS):
            for mode, run in runs.items():
                figures.setdefault(case, {}).setdefault(mode, []).append(run())
    return figures


class _Nodelet(Nodelet):
    """A nodelet as the benchmark of transfers sees it, with the settings of a mode."""

    def __init__(self, url: str, arena_dir: str, token: str, settings: Settings) -> None:
        from stoker_wire.arena import Arena

        self.arena = Arena(arena_dir)
        self.client = Client(url, token=token, peer="benchmark", settings=settings)


def main() -> None:
    """Measure, print medians and ratios, and append them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work, to see it run")
    parser.add_argument("--csv", type=Path, help=f"append to this file, as {HERE / 'results.csv'}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        certificates.init(folder, name="benchmark")
        certificates.issue(folder, "node")
        stack.enter_context(environment({"STOKER_SESSION_ROOT": name}))
        figures = measure(folder, options.quick, stack)
    rows = []
    for case, of_mode in figures.items():
        plain, mutual = (statistics.median(of_mode[mode]) for mode in MODES)
        unit = case.rpartition("_")[2] if not case.endswith("mb_s") else "MB/s"
        pairs = zip(of_mode["off"], of_mode["mutual"], strict=True)
        ratio = statistics.median(one / two if unit == "MB/s" else two / one for one, two in pairs)
        rows += [
            Row(f"tls_off_{case}", plain, unit),
            Row(f"tls_mutual_{case}", mutual, unit),
            Row(f"tls_costs_{case}", ratio, "x"),
        ]
    show(rows)
    if options.csv is not None:
        append(options.csv, "stoker", VERSION, rows)


if __name__ == "__main__":
    main()
