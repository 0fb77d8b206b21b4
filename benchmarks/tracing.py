"""``python -m benchmarks.tracing``: what traces cost a task, as CPU time of all its cluster's processes.

One cluster without export, one that exports spans to a collector in this process, and with
``--beside PYTHON`` one of another checkout (its interpreter), to compare with code that has no traces.
They take turns with batches of tasks, for a shared machine has faster and slower moments; printed are
medians of the times, and of the ratios of each turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, NamedTuple

from benchmarks.results import HERE, Row, append, show

TASKS = 10_000
WARM = 3
ROUNDS = 20
MARK = "BENCHMARK_VARIANT"
"""A variable in the environment of each process of a variant's cluster, which says whose it is."""
_HZ = os.sysconf("SC_CLK_TCK")


class _Sink(BaseHTTPRequestHandler):
    """A collector that reads spans and keeps none."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Variant(NamedTuple):
    """A driver with a cluster of its own."""

    name: str
    process: subprocess.Popen[str]

    def batch(self) -> float:
        """Run the tasks; return the CPU time of each, in us."""
        before = cpu_s(self.name)
        self.tell("go")
        return (cpu_s(self.name) - before) / TASKS * 1e6

    def tell(self, line: str) -> None:
        """Have it do one thing, and wait until it has."""
        _pipe(self.process.stdin).write(f"{line}\n")
        _pipe(self.process.stdin).flush()
        if _pipe(self.process.stdout).readline().strip() != "done":
            raise SystemExit(f"the driver of {self.name} ended")


def _pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


def cpu_s(name: str) -> float:
    """Return the CPU time of the processes of a variant, those that ended beneath them included."""
    mark, total = f"{MARK}={name}\0".encode(), 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                total += sum(int(ticks) for ticks in fields[11:15])
        except OSError:
            continue  # not ours, or it has ended
    return total / _HZ


def driver() -> None:
    """Run a batch for each line that is read."""
    import stoker

    @stoker.remote
    def noop() -> None:
        return None

    stoker.init(num_cpus=2, log_to_driver=False)
    for _ in sys.stdin:
        stoker.get([noop.remote() for _ in range(TASKS)])
        print("done", flush=True)
    stoker.shutdown()


def start(name: str, python: str, folder: Path, **env: str) -> Variant:
    """Start the driver of a variant; it has warmed up when this returns."""
    mine = {**os.environ, MARK: name, "STOKER_SESSION_ROOT": str(folder / name), **env}
    command = [python, "-m", "benchmarks.tracing", "--driver"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, cwd=HERE.parent, env=mine
    )
    variant = Variant(name, process)
    for _ in range(WARM):
        variant.tell("go")
    return variant


def measured(folder: Path, rounds: int, beside: str) -> list[Row]:
    """Let the variants take turns; return medians of their times and of their ratios."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as sink:
        threading.Thread(target=sink.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{sink.server_address[1]}"
        variants = [
            start("off", sys.executable, folder),
            start("on", sys.executable, folder, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint),
        ]
        if beside:
            variants.append(start("beside", beside, folder))
        took: dict[str, list[float]] = {one.name: [] for one in variants}
        for turn in range(rounds):
            for one in variants if turn % 2 else reversed(variants):
                took[one.name].append(one.batch())
        for one in variants:
            _pipe(one.process.stdin).close()
            one.process.wait(60)
        sink.shutdown()
    rows = [Row(f"tracing_{name}_cpu", statistics.median(us), "us") for name, us in took.items()]
    rows.append(Row("tracing_on_ratio", _ratio(took["on"], took["off"]), "x"))
    if beside:
        rows.append(Row("tracing_off_ratio", _ratio(took["off"], took["beside"]), "x"))
    return rows


def _ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


def main() -> int:
    """Run it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--driver", action="store_true", help=argparse.SUPPRESS)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--beside", default="", help="the Python of another checkout")
    options.add_argument("--csv", type=Path, default=HERE / "results.csv")
    given = options.parse_args()
    if given.driver:
        driver()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(Path(folder), given.rounds, given.beside)
    show(rows)
    from stoker_wire.version import VERSION

    append(given.csv, "stoker", VERSION, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
