"""``python -m benchmarks.hops``: where the time of one sync call goes, hop by hop.

Wraps the functions that a call passes, in the driver and in the worker, and notes the (common,
monotonic) clock at each; prints the median between one hop and the next over many calls. The
wrappers cost a little (under 1 us each); the sum is compared with calls that are not wrapped.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import stoker
from benchmarks.results import Row, show

WAIT_S = 60.0


class Trace:
    """The clock at each hop of one process, in order."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float]] = []

    def wrap(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Note when a method is entered, and when it is left."""
        inner: Callable[..., Any] = getattr(owner, name)
        marks, clock = self.marks, time.perf_counter

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                marks.append((before, clock()))
            try:
                return inner(*args, **kwargs)
            finally:
                if after:
                    marks.append((after, clock()))

        setattr(owner, name, wrapped)


TRACE = Trace()
"""This process's marks."""


def wrap_worker() -> None:
    """Note the hops of calls at this worker from now on."""
    from stoker.runtime.worker import execute, invoke
    from stoker_wire.data.frame_socket import FrameSocket
    from stoker_wire.data.frames import FrameCodec

    TRACE.wrap(FrameSocket, "read", "worker: woken")
    TRACE.wrap(FrameCodec, "decode", "worker: frame read", "worker: frame decoded")
    TRACE.wrap(invoke.Invoker, "load_arguments", "worker: call taken")
    TRACE.wrap(execute.CallExecutor, "report", "worker: user code returned")
    TRACE.wrap(FrameCodec, "encode_parts", "worker: history written", "worker: result encoded")
    TRACE.wrap(FrameSocket, "send", "", "worker: result sent")


def wrap_driver() -> None:
    """Note the hops of calls at this driver from now on."""
    from stoker.runtime.objects.waiters import FailFastWaiter
    from stoker.runtime.tasks.pending import PendingCalls
    from stoker_wire.data.frame_socket import FrameSocket
    from stoker_wire.data.frames import FrameCodec

    TRACE.wrap(PendingCalls, "send_soon", "driver: packed and queued")
    TRACE.wrap(FrameCodec, "encode_parts", "driver: worker chosen", "driver: frame encoded")
    TRACE.wrap(FrameSocket, "send", "", "driver: frame sent")
    TRACE.wrap(FrameSocket, "read", "driver: woken")
    TRACE.wrap(FrameCodec, "decode", "driver: result read", "driver: result decoded")
    TRACE.wrap(FailFastWaiter, "settled", "driver: result settled")


@stoker.remote
def begin() -> None:
    """Have this worker note hops."""
    # A remote function travels by value, with globals of its own: the trace is the module's.
    from benchmarks import hops

    hops.wrap_worker()


@stoker.remote
def noop() -> None:
    """Do nothing."""


@stoker.remote
def marks() -> list[tuple[str, float]]:
    """Return what this worker noted."""
    from benchmarks import hops

    return hops.TRACE.marks


@stoker.remote(num_cpus=0)
class Actor:
    """Does nothing."""

    def begin(self) -> None:
        """Have this worker note hops."""
        from benchmarks import hops

        hops.wrap_worker()

    def call(self) -> None:
        """Do nothing."""

    def marks(self) -> list[tuple[str, float]]:
        """Return what this worker noted."""
        from benchmarks import hops

        return hops.TRACE.marks


def budget(call: Callable[[], Any], marks_of: Callable[[], Any], count: int) -> list[Row]:
    """Return the median time between hops of a call."""
    TRACE.marks.clear()
    calls: list[tuple[float, float]] = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        calls.append((began, time.perf_counter()))
    mine = list(TRACE.marks)
    noted = sorted([*mine, *marks_of()], key=lambda mark: mark[1])
    gaps: dict[str, list[float]] = {}
    position = 0
    for began, ended in calls:
        last, seen = began, set()
        while position < len(noted) and noted[position][1] < ended:
            name, at_s = noted[position]
            position += 1
            if at_s > began and name not in seen:
                seen.add(name)
                gaps.setdefault(name, []).append((at_s - last) * 1e6)
                last = at_s
        gaps.setdefault("driver: get returned", []).append((ended - last) * 1e6)
    rows = [
        Row(name, statistics.median(took), "us")
        for name, took in gaps.items()
        if len(took) > count / 2
    ]
    rows.append(Row("sum", sum(row.value for row in rows), "us"))
    rows.append(Row("whole call", statistics.median(e - b for b, e in calls) * 1e6, "us"))
    return rows


def plain(call: Callable[[], Any], count: int) -> float:
    """Return the median time of a call, in microseconds."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hops", description=__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    stoker.init(num_cpus=1, num_gpus=0, log_to_driver=False)
    try:
        actor = Actor.remote()

        def task_call() -> None:
            stoker.get(noop.remote(), timeout=WAIT_S)

        def actor_call() -> None:
            stoker.get(actor.call.remote(), timeout=WAIT_S)

        unwrapped = [plain(c, options.calls) for c in (task_call, actor_call)]
        stoker.get([begin.remote(), actor.begin.remote()], timeout=WAIT_S)
        wrap_driver()
        cases = {
            "one sync task call": (
                task_call,
                lambda: stoker.get(marks.remote(), timeout=WAIT_S),
            ),
            "one sync actor call": (
                actor_call,
                lambda: stoker.get(actor.marks.remote(), timeout=WAIT_S),
            ),
        }
        for (title, (call, marks_of)), alone_us in zip(cases.items(), unwrapped, strict=True):
            print(f"\n{title}: time since the hop before, median of {options.calls}")
            show([*budget(call, marks_of, options.calls), Row("not wrapped", alone_us, "us")])
    finally:
        stoker.shutdown()
    return 0


if __name__ == "__main__":
    # Under its own name, by which the workers import it.
    from benchmarks import hops

    sys.exit(hops.main())
