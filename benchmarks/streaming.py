"""Streams of records: ``stoker.data.stream``, beside torch's ``DataLoader`` with workers over the same files.

``python -m benchmarks.streaming`` writes JSON lines to files of very different sizes (one has half of all),
and reads them: with readers that are killed at random (each record once, in order, the memory of the
consumer), undisturbed, shuffled, from memory, and with the DataLoader. Both have ``--readers`` processes and
batches of 256. The DataLoader's workers split the files among them, as its documentation has it; its order is
that of the workers, and a killed worker ends it. Then how long a step takes if loading and computing take 10
ms each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stoker
from benchmarks.results import Row, append, show

BATCH = 256
STEP_S = 0.01


class Marked(stoker.data.JsonLines):
    """JSON lines whose readers say who they are."""

    def read(self, path: str, start: int, stop: int, skip: int) -> Iterator[Any]:
        """Yield records, as JsonLines do."""
        Path(f"{os.environ['STREAM_PIDS']}/{os.getpid()}").touch()
        return super().read(path, start, stop, skip)


def write_files(folder: Path, records: int) -> list[str]:
    """Write so many records to 12 files, the first of which has half."""
    sizes = [records // 2, *[records // 22] * 10]
    sizes.append(records - sum(sizes))
    number, paths = 0, []
    for at, size in enumerate(sizes):
        paths.append(str(folder / f"part-{at:02}.jsonl"))
        with open(paths[-1], "w") as file:
            for _ in range(size):
                file.write(json.dumps({"n": number, "text": "x" * 50}) + "\n")
                number += 1
    return paths


def rss_nbytes() -> int:
    """Return the memory of this process, without what it shares."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def kill_readers(folder: Path, every_s: float, seed: int, done: threading.Event) -> list[int]:
    """Kill a reader that lives every so often, until ``done``; return the list that grows by them."""
    rng, killed = random.Random(seed), []

    def run() -> None:
        while not done.wait(every_s * rng.uniform(0.5, 1.5)):
            pids = sorted(folder.iterdir())
            rng.shuffle(pids)
            for path in pids:
                path.unlink(missing_ok=True)
                try:
                    os.kill(int(path.name), signal.SIGKILL)
                except ProcessLookupError:
                    continue
                killed.append(int(path.name))
                break

    threading.Thread(target=run, daemon=True).start()
    return killed


def read(paths: list[str], label: str, parser: Any, count: int, **options: Any) -> list[Row]:
    """Read an epoch in batches, and check that each of ``count`` records comes once; return rates.

    Without a shuffle they must come in order. Nothing that was read is kept, so the memory is the stream's.
    """
    with stoker.data.stream(paths, parser, batch=BATCH, **options) as stream:
        if options.get("cache"):
            for _ in stream:
                pass
        opened = stream.stats.opened  # by the epoch before
        seen, in_order, number = bytearray(count), True, 0
        before, most, began_s = rss_nbytes(), 0, time.perf_counter()
        for batch in stream:
            for record in batch:
                in_order &= record["n"] == number
                assert not seen[record["n"]], "a record came twice"
                seen[record["n"]] = 1
                number += 1
            if number // BATCH % 16 == 0:
                most = max(most, rss_nbytes())
        took_s = time.perf_counter() - began_s
        assert number == count, "a record is missing"
        assert in_order == (not options.get("shuffle")), "the order is wrong"
        stats = stream.stats
        rows = [
            Row(f"{label}: records/s", count / took_s, "1/s"),
            Row(f"{label}: consumer's memory grows by", max(0, most - before) / 1e6, "MB"),
            Row(f"{label}: most in flight", stats.max_in_flight, "records"),
            Row(f"{label}: files and parts opened", stats.opened - opened, ""),
            Row(f"{label}: readers replaced", stats.replaced, ""),
        ]
        if len(stats.nbytes) > 1 and not stats.replaced:
            loads = stats.nbytes.values()
            rows.append(Row(f"{label}: max/min bytes of a reader", max(loads) / min(loads), ""))
    return rows


def read_torch(paths: list[str], workers: int) -> list[Row]:
    """Read an epoch with a DataLoader whose workers take files in turn."""
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class FilesOfAWorker(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None
            for path in paths[info.id :: info.num_workers]:
                with open(path) as file:
                    yield from map(json.loads, file)

    loader = DataLoader(
        FilesOfAWorker(), batch_size=BATCH, num_workers=workers, collate_fn=lambda records: records
    )
    count, began_s = 0, time.perf_counter()
    for batch in loader:
        count += len(batch)
    return [
        Row("DataLoader with workers: records/s", count / (time.perf_counter() - began_s), "1/s")
    ]


def step_times(steps: int) -> list[Row]:
    """Return how long a step takes with and without a prefetch."""

    def source() -> Iterator[int]:
        for number in range(steps):
            time.sleep(STEP_S)
            yield number

    def median(items: Any) -> float:
        times, last_s = [], time.perf_counter()
        for _ in items:
            time.sleep(STEP_S)
            now_s = time.perf_counter()
            times.append(now_s - last_s)
            last_s = now_s
        return statistics.median(times) * 1e3

    return [
        Row("10 ms load, 10 ms compute: in turn", median(source()), "ms"),
        Row("10 ms load, 10 ms compute: prefetch", median(stoker.data.prefetch(source())), "ms"),
    ]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10**6)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=0.4, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--csv", help="append the figures to this file")
    args = parser.parse_args()
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = folder / "pids"
        pids.mkdir()
        count, fewer = args.records, args.records // 10
        paths = write_files(folder, count)
        (folder / "fewer").mkdir()
        few = write_files(folder / "fewer", fewer)
        # Before the cluster: the workers of a DataLoader are forked.
        rows = read_torch(paths, args.readers)
        os.environ["STREAM_PIDS"] = str(pids)
        stoker.init(num_cpus=max(4, args.readers), num_gpus=0, log_to_driver=False)
        lines, common = stoker.data.JsonLines(), {"readers": args.readers}
        rows += read(few, "a tenth of it", lines, fewer, **common)
        rows += read(paths, "stream", lines, count, **common)
        done = threading.Event()
        killed = kill_readers(pids, args.kill_every, args.seed, done)
        rows += read(paths, "readers killed", Marked(), count, max_failures=1000, **common)
        done.set()
        rows.append(Row("readers killed: SIGKILLs", len(killed), ""))
        rows += read(paths, "shuffled by 10,000", lines, count, shuffle=10_000, **common)
        rows += read(paths, "epoch 2 from memory", lines, count, cache="memory", **common)
        stoker.shutdown()
    rows += step_times(200)
    show(rows)
    if args.csv:
        append(args.csv, "stoker", stoker.__version__, rows)


if __name__ == "__main__":
    main()
