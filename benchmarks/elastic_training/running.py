"""A cluster for the benchmarks of elastic training, and jobs on it that are waited for and resized."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import stoker
from benchmarks.elastic_training.loops import Line, lines
from stoker.train import Checkpoint, ElasticTrainer, Failure, Scaling

WAIT_S = 180.0
POLL_S = 0.02
COMMIT_EVERY = 10


@contextlib.contextmanager
def cluster(
    cpus: int, nodes: int = 1, *, gpus: int = 0, interval_s: float = 1.0
) -> Iterator[stoker.ClusterInfo]:
    """A cluster of nodes with so many CPUs and fake GPUs each, on this machine.

    Rounds of its scheduler come every ``interval_s``, and soon where something happens.

    A job gets a power of two of a node's replicas, or whole nodes: other counts need small nodes.
    """
    os.environ |= {
        "STOKER_ELASTIC_INTERVAL_S": f"{interval_s:g}",
        "STOKER_ELASTIC_MIN_INTERVAL_S": "0.2",
        "OMP_NUM_THREADS": "1",
    }
    info = stoker.init(num_cpus=cpus, num_gpus=gpus, log_to_driver=False)
    added: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="stoker-nodes-") as folder:
        try:
            added += [_node(info, cpus, gpus, f"{folder}/{n}") for n in range(nodes - 1)]
            yield info
        finally:
            for one in added:
                one.terminate()
            for one in added:
                one.wait(WAIT_S)
            stoker.shutdown()


def _node(info: stoker.ClusterInfo, cpus: int, gpus: int, folder: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "stoker_nodelet", "--gcs-url", info.address, "--port", "0"]
    command += ["--num-cpus", str(cpus), "--num-gpus", str(gpus), "--session-dir", folder]
    environ = {**os.environ, "STOKER_TOKEN": info.token}
    return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)


class Running:
    """A job whose loop writes its steps into ``folder``."""

    def __init__(
        self,
        loop: Callable[..., Any],
        folder: Path,
        *,
        replicas: tuple[int, int],
        batch: int,
        **config: Any,
    ) -> None:
        self.steps = folder / "steps"
        self.steps.mkdir()
        self.trainer = ElasticTrainer(
            loop,
            config={"folder": str(self.steps), **config},
            scaling=Scaling(
                min_replicas=replicas[0],
                max_replicas=replicas[1],
                resources={"CPU": 1},
                base_batch=batch,
                adapt="replicas",
            ),
            checkpoint=Checkpoint(
                str(folder / "checkpoints"), every=1_000_000, commit_every=COMMIT_EVERY
            ),
            failure=Failure(hang_s=60.0),
        )
        self.trainer.submit()

    def lines(self) -> list[Line]:
        """Return its steps so far."""
        return lines(self.steps)

    def until(self, done: Callable[[], object], what: str) -> None:
        """Return when ``done``; TimeoutError, which says how the job is, after a while."""
        deadline_s = time.monotonic() + WAIT_S
        while not done():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not in {WAIT_S:g} s: {what}; {self.trainer.progress()}")
            time.sleep(POLL_S)

    def await_world(self, world: int, steps: int = 3) -> list[Line]:
        """Return its lines when the newest generation is of ``world`` replicas and has made some steps."""

        def has() -> bool:
            found = self.lines()
            newest = max((one.generation for one in found), default=0)
            of_it = [one for one in found if one.generation == newest]
            return len({one.step for one in of_it}) >= steps and of_it[0].world == world

        self.until(has, f"{world} replicas have made {steps} steps")
        return self.lines()

    def resize(self, world: int) -> list[Line]:
        """Ask for so many replicas, wait until they train, and return the lines."""
        self.trainer.resize(world)
        return self.await_world(world)

    def end(self) -> Any:
        """Stop it, and return its result; an error ends the benchmark, as a ledger that is not exact does."""
        self.trainer.stop()
        return checked(self.trainer.result(WAIT_S))


def checked(result: Any) -> Any:
    """Return a result that is well."""
    if result.error or not result.ledger_ok:
        raise SystemExit(f"the job is not well: {result.error} {result.ledger_problems}")
    return result


@contextlib.contextmanager
def running(loop: Callable[..., Any], **options: Any) -> Iterator[Running]:
    """A job that is stopped at the end, if it still runs."""
    with tempfile.TemporaryDirectory(prefix="stoker-elastic-") as name:
        one = Running(loop, Path(name), **options)
        try:
            yield one
        finally:
            with contextlib.suppress(Exception):
                if one.trainer._records.result() is None:
                    one.trainer.stop()
                    one.trainer.result(60.0)


def note(text: str) -> None:
    """Tell how it goes."""
    print(text, file=sys.stderr, flush=True)


def gap_s(found: list[Line], generation: int) -> float:
    """Return the time from the last step before ``generation`` to its first, of processes in both."""
    after = [one for one in found if one.generation == generation]
    pids = {one.pid for one in after}
    before = [one for one in found if one.generation < generation and one.pid in pids]
    return min(one.at_s for one in after) - max(one.at_s for one in before)
