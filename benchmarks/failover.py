"""The failover of the scheduler, measured: ``python -m benchmarks.failover``, with the default settings.

Two schedulers, of which one leads and the other stands by, and a steady load of tasks, nested tasks, calls
of an actor and creations of actors. Each round kills the leader, or freezes it, and measures until a task of
a class that no lease is held for has its result, and which call of the load took the longest; then it starts
again, or wakes, and stands by. A call that fails ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import stoker
from stoker_wire.settings import Settings
from tests.chaos._load import GET_S, Load
from tests.chaos._services import FAST, apart
from tests.services import until

if TYPE_CHECKING:
    from tests.chaos._services import Service

DEFAULTS = {name: str(getattr(Settings(), name.removeprefix("STOKER_").lower())) for name in FAST}
ENOUGH = {"task": 200, "nested": 50, "call": 200, "actor": 3}
FAULTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
CPUS = 8


@stoker.remote(num_cpus=0.1)
def double(number: int) -> int:
    """Return twice a number."""
    return 2 * number


@stoker.remote(num_cpus=0.1)
def nested(number: int) -> int:
    """Return twice a number, by another task."""
    return stoker.get(double.remote(number))


@stoker.remote(num_cpus=0)
class Counter:
    """A counter of calls."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> int:
        """Return how many calls there were."""
        self._count += 1
        return self._count


def steady_load() -> Load:
    """Return threads that call again and again."""
    counter = Counter.remote()

    def call(number: int) -> None:
        assert stoker.get(counter.add.remote(), timeout=GET_S) == number + 1

    def actor(_: int) -> None:
        made = Counter.remote()
        assert stoker.get(made.add.remote(), timeout=GET_S) == 1
        stoker.kill(made)

    return Load(
        ENOUGH,
        pause_s=0.01,
        task=lambda number: _equal(stoker.get(double.remote(number), timeout=GET_S), 2 * number),
        nested=lambda number: _equal(stoker.get(nested.remote(number), timeout=GET_S), 2 * number),
        call=call,
        actor=actor,
    )


def _equal(value: int, expected: int) -> None:
    assert value == expected, f"{value} instead of {expected}"


def measure(rounds: int) -> dict[str, list[tuple[float, float, str]]]:
    """Return, by fault, how long placing took to go on, and the slowest call and its kind."""
    classes = itertools.count(1)
    measured: dict[str, list[tuple[float, float, str]]] = {name: [] for name in FAULTS}
    with (
        tempfile.TemporaryDirectory() as folder,
        apart(Path(folder), cpus=CPUS, **DEFAULTS) as cluster,
    ):
        stoker.init(cluster.address, token=cluster.token, log_to_driver=False)
        leader, standby = cluster.scheduler, cluster.add_scheduler()
        try:
            with steady_load() as load:
                load.goes_on()
                for _, (name, fault) in itertools.product(range(rounds), FAULTS.items()):
                    load.slowest_s = dict.fromkeys(load.slowest_s, 0.0)
                    began_s = time.monotonic()
                    leader.send(fault)
                    fresh = double.options(num_cpus=0.1 + next(classes) / 1000)
                    _equal(stoker.get(fresh.remote(1), timeout=GET_S), 2)
                    took_s = time.monotonic() - began_s
                    load.goes_on()
                    slowest = max(load.slowest_s, key=load.slowest_s.__getitem__)
                    measured[name].append((took_s, load.slowest_s[slowest], slowest))
                    _stands_by(leader, fault)
                    load.goes_on()
                    leader, standby = standby, leader
        finally:
            for scheduler in (leader, standby):
                with contextlib.suppress(ProcessLookupError):
                    scheduler.send(signal.SIGCONT)
            stoker.shutdown()
    return measured


def _stands_by(former: Service, fault: signal.Signals) -> None:
    if fault is signal.SIGKILL:
        former.kill()
        former.start(ready=False)
        until(lambda: former.answers("/healthz"), GET_S, "it stands by")
    else:
        former.send(signal.SIGCONT)


def main() -> None:
    """Print the median and the maximum of some rounds."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5, help="how many of each fault (default 5)")
    args = parser.parse_args()
    for name, found in measure(args.rounds).items():
        placed, slowest = [one[0] for one in found], [one[1] for one in found]
        kind = max(found, key=lambda one: one[1])[2]
        print(
            f"{name:6}  a task of a new class has its result: median {statistics.median(placed):.2f} s, "
            f"max {max(placed):.2f} s; slowest call of the load: median "
            f"{statistics.median(slowest):.2f} s, max {max(slowest):.2f} s ({kind}); none failed"
        )


if __name__ == "__main__":
    main()
