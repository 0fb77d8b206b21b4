"""Mixed load ends where it began: no object, table row or megabyte an hour is left behind.

``make soak``: an hour, or ``STOKER_SOAK_S`` seconds. Prints the slope of memory by process, of the
arena and of the tables, and fails when all memory together grows by more than the bound.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

import stoker
from stoker.runtime.current import runtime
from tests.services import until
from tests.soak.slopes import Slopes

SOAK_S = float(os.environ.get("STOKER_TEST_SOAK_S", "3600"))
WARM_UP_PART = 0.25
"""The first part of the run: allocators and caches fill."""
SAMPLES = 200
LARGE = 300_000
BOUND_MB_PER_H = 20.0
"""What all processes and the arena may grow by, as the slope over the run after the warm-up."""
NOISE_MB = 40.0
"""What they vary by while nothing grows: over a short run it looks like a slope."""


@stoker.remote
def echo(value: object) -> object:
    return value


@stoker.remote
def keep(values: list[stoker.ObjectRef[bytes]]) -> int:
    return sum(len(v) for v in stoker.get(values))


@stoker.remote
class Holder:
    def __init__(self) -> None:
        self.refs: list[stoker.ObjectRef[bytes]] = []

    def hold(self, refs: list[stoker.ObjectRef[bytes]]) -> int:
        self.refs = refs
        return len(refs)


def one_round(holder: stoker.ActorHandle[Holder]) -> None:
    """A little of everything that makes objects and tasks."""
    large = [stoker.put(os.urandom(LARGE)) for _ in range(4)]
    assert stoker.get(keep.remote(large), timeout=60) == 4 * LARGE
    assert stoker.get(holder.hold.remote(large), timeout=60) == 4
    assert stoker.get([echo.remote(i) for i in range(2000)], timeout=60) == list(range(2000))
    short_lived = Holder.remote()
    assert stoker.get(short_lived.hold.remote([]), timeout=60) == 0


def resident_mb(process: psutil.Process) -> float:
    """Memory of one process; 0 if it has just ended."""
    try:
        return float(process.memory_info().rss) / 2**20
    except psutil.Error:
        return 0.0


def sizes(arena: Path) -> dict[str, float]:
    """What there is now: MB by kind of process and in the arena, rows in the driver's tables."""
    me = psutil.Process()
    (head,) = [p for p in me.children() if "stoker.launch" in " ".join(p.cmdline())]
    gc.collect()
    return {
        "driver MB": resident_mb(me),
        "head MB": resident_mb(head),
        "workers MB": sum(resident_mb(p) for p in head.children(recursive=True)),
        "arena MB": sum(p.stat().st_blocks * 512 for p in arena.rglob("*") if p.is_file()) / 2**20,
        "objects": len(runtime().objects.table),
        "tasks": len(runtime().pending),
    }


@pytest.mark.timeout(SOAK_S + 180)
def test_steady_load_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    info = stoker.init(num_cpus=2, num_gpus=0, log_to_driver=False)
    try:
        node = next(n for n in stoker.nodes() if n["node_id"] == info.node_id)
        arena = Path(node["arena_dir"])
        holder = Holder.remote()
        slopes, rounds = Slopes(), 0
        began = time.monotonic()
        next_s = began + WARM_UP_PART * SOAK_S
        while (now := time.monotonic()) - began < SOAK_S:
            one_round(holder)
            rounds += 1
            if now >= next_s:
                slopes.sample(sizes(arena))
                next_s = now + SOAK_S / SAMPLES
        stoker.get(holder.hold.remote([]), timeout=60)
        gc.collect()
        until(lambda: not list(arena.glob("o_*")), 20, "the arena is empty")
        until(lambda: len(runtime().objects.table) <= 2, 20, "the object table is empty")
        assert not runtime().pending
        assert runtime().events.dropped == 0
    finally:
        stoker.shutdown()
    grown = sum(slope for name, slope in slopes.per_hour().items() if name.endswith("MB"))
    bound = BOUND_MB_PER_H + NOISE_MB / slopes.span_h
    with capsys.disabled():
        sys.stdout.write(
            f"\n{rounds} rounds in {SOAK_S:g} s\n{slopes.table()}\n"
            f"all memory: {grown:+.1f} MB/h (bound {bound:.0f} MB/h over {slopes.span_h:.2f} h)\n"
        )
    assert grown < bound
