"""All-reduce between actors: ``stoker.collective``, torch's own gloo in the same actors, and Ray's.

``python -m benchmarks.collectives`` times 16 bytes (the fixed cost), 1 kB, 1, 10, 64 and 100 MB on 2 and 4
actors, with and without the exchange of headers, beside ``torch.distributed.all_reduce``. ``--peer
ray=PYTHON`` has the Python of another environment, which has torch and Ray, do the same with
``ray.util.collective``. It is Ray's API that both have: so this file imports neither before it knows which.
Within a round the order is drawn, the same on all members; medians are printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIZES = {
    "16 B": 16,
    "1 kB": 10**3,
    "1 MB": 10**6,
    "10 MB": 10**7,
    "64 MB": 64 * 10**6,
    "100 MB": 10**8,
}
TIMEOUT_S = 300.0


class Member:
    """An actor of a group."""

    def __init__(self, api: str, rank: int, world: int) -> None:
        import torch

        torch.set_num_threads(1)
        self.api, self.rank, self.world = api, rank, world

    def join(self) -> None:
        """Join the groups that are compared."""
        if self.api == "ray":
            col = importlib.import_module("ray.util.collective")
            col.init_collective_group(self.world, self.rank, "gloo", "checked")
            return
        from stoker import collective, train

        for name, check in (("checked", True), ("unchecked", False)):
            collective.join(name, rank=self.rank, world_size=self.world, check=check)
        train.init_process_group("raw", self.rank, self.world, backend="gloo")

    def times(self, nbytes: int, rounds: int) -> dict[str, list[float]]:
        """Return the seconds of all-reduces of so many bytes, by how they are done."""
        import torch

        tensor = torch.zeros(max(1, nbytes // 4))
        ways = self._ways(tensor)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            order = list(ways.items())
            random.Random(number).shuffle(order)
            for name, reduce in order:
                began_s = time.perf_counter()
                reduce()
                if number:  # the first has pages to touch
                    found[name].append(time.perf_counter() - began_s)
        return found

    def _ways(self, tensor: Any) -> dict[str, Callable[[], Any]]:
        if self.api == "ray":
            col = importlib.import_module("ray.util.collective")
            return {"ray.util.collective": lambda: col.allreduce(tensor, "checked")}
        import torch.distributed as dist

        from stoker import collective

        checked, unchecked = (collective.group(name) for name in ("checked", "unchecked"))
        return {
            "torch.distributed": lambda: dist.all_reduce(tensor),
            "stoker.collective": lambda: checked.all_reduce(tensor),
            "the same, check=False": lambda: unchecked.all_reduce(tensor),
        }


def measure(api_name: str, worlds: list[int], rounds: int) -> None:
    """Print the medians of one API."""
    api = importlib.import_module(api_name)
    api.init(num_cpus=max(worlds), log_to_driver=False)
    try:
        for world in worlds:
            actor = api.remote(num_cpus=1)(Member)
            members = [actor.remote(api_name, rank, world) for rank in range(world)]
            api.get([one.join.remote() for one in members], timeout=TIMEOUT_S)
            for title, nbytes in SIZES.items():
                count = rounds * 40 if nbytes < 10**6 else rounds
                refs = [one.times.remote(nbytes, count) for one in members]
                by_rank = api.get(refs, timeout=TIMEOUT_S)
                for name in by_rank[0]:
                    slowest = [
                        max(each) for each in zip(*(one[name] for one in by_rank), strict=True)
                    ]
                    middle = statistics.median(slowest)
                    print(
                        f"{world} actors  {title:>7}  {name:24} {middle * 1e3:10.3f} ms", flush=True
                    )
            for one in members:
                api.kill(one)
    finally:
        api.shutdown()


def main() -> int:
    """Measure Stoker, and the peers that are named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("--world", type=int, action="append", help="number of actors (2 and 4)")
    parser.add_argument("--rounds", type=int, default=10, help="of each size (default 10)")
    parser.add_argument("--api", default="stoker", help="module to import (default stoker)")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    worlds = options.world or [2, 4]
    measure(options.api, worlds, options.rounds)
    for peer in options.peer:
        name, _, python = peer.partition("=")
        command = [python, __file__, "--api", name, "--rounds", str(options.rounds)]
        for world in worlds:
            command += ["--world", str(world)]
        subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
