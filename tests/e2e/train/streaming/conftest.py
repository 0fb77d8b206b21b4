"""What the tests of streams share: a cluster for each module, files, and parsers that can be killed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from tests.e2e._cluster import embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("STOKER_INFEASIBLE_GRACE_S", "0.5")
        with embedded(tmp_path_factory.mktemp("s"), num_cpus=4, num_gpus=0):
            yield


@pytest.fixture
def _nothing_stays(cluster: None) -> Iterator[None]:
    """No actor, no thread and no object in shared memory is left by a test."""
    yield
    until(is_idle, WAIT_S, "the readers to end")
    until(lambda: not prefetchers(), WAIT_S, "the threads to end")
    (node,) = stoker.nodes()
    folder = node["arena_dir"]
    until(
        lambda: not [one for one in os.listdir(folder) if one.startswith("o_")],
        WAIT_S,
        "the objects to be freed",
    )


def is_idle() -> bool:
    return bool(stoker.available_resources() == stoker.cluster_resources())


def prefetchers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "stoker-prefetch"]


class Marked:
    """JSON lines, whose readers leave their process ids in a folder: what a test kills."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def split(self, path: str, nbytes: int) -> Any:
        return stoker.data.JsonLines().split(path, nbytes)

    def read(self, path: str, start: int, stop: int, skip: int) -> Iterator[Any]:
        with open(f"{self.folder}/{os.getpid()}", "w"):
            pass
        return stoker.data.JsonLines().read(path, start, stop, skip)

    def count(self, path: str, start: int, stop: int) -> int:
        return stoker.data.JsonLines().count(path, start, stop)


class Killer:
    """Kills readers at random, as a seed has it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        folder.mkdir(exist_ok=True)
        self.kills = 0

    def maybe_kill(self, chance: float) -> None:
        """Kill a reader that lives, by chance."""
        if self.rng.random() >= chance:
            return
        pids = sorted(self.folder.iterdir())
        self.rng.shuffle(pids)
        for path in pids:
            path.unlink(missing_ok=True)
            try:
                os.kill(int(path.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.kills += 1
            return


def write_files(folder: Path, sizes: list[int]) -> list[int]:
    """Write JSON lines with so many records to each file; return the values of all, in order."""
    number = 0
    for at, size in enumerate(sizes):
        with open(folder / f"part-{at:02}.jsonl", "w") as file:
            for _ in range(size):
                file.write(json.dumps({"n": number}) + "\n")
                number += 1
    return list(range(number))
