"""Minutes of mixed load end where they began: no object, table row or megabyte is left behind.

``make soak``; ``STOKER_TEST_SOAK_S`` sets how long (default 120 s).
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import psutil
import pytest

import stoker
from stoker._session import runtime
from tests.services import until

SOAK_S = float(os.environ.get("STOKER_TEST_SOAK_S", "120"))
WARM_UP_S = 20.0
LARGE = 300_000
GROWTH_MB = 60.0
"""Allowed for all processes together, after the warm-up: allocators settle, leaks do not."""


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


def resident_mb() -> float:
    """Memory of this process and all that it started."""
    me = psutil.Process()
    return sum(p.memory_info().rss for p in (me, *me.children(recursive=True))) / 2**20


@pytest.mark.timeout(SOAK_S + 180)
def test_steady_load_leaves_nothing_behind() -> None:
    info = stoker.init(num_cpus=2, num_gpus=0, log_to_driver=False)
    try:
        holder = Holder.remote()
        began, rounds = time.monotonic(), 0
        baseline_mb = 0.0
        while time.monotonic() - began < SOAK_S:
            one_round(holder)
            rounds += 1
            if not baseline_mb and time.monotonic() - began > min(WARM_UP_S, SOAK_S / 2):
                baseline_mb = resident_mb()
        stoker.get(holder.hold.remote([]), timeout=60)
        gc.collect()
        node = next(n for n in stoker.nodes() if n["node_id"] == info.node_id)
        arena = Path(node["arena_dir"])
        until(
            lambda: not [p for p in arena.iterdir() if p.name[0] != "."], 20, "the arena is empty"
        )
        until(lambda: len(runtime().objects.table) <= 2, 20, "the object table is empty")
        assert not runtime().tasks.pending
        assert runtime().history.dropped == 0
        grown_mb = resident_mb() - baseline_mb
        assert grown_mb < GROWTH_MB, f"{grown_mb:.0f} MB more after {rounds} rounds"
    finally:
        stoker.shutdown()
