"""Parameter servers: rows/s of one server beside Redis, and the modes of workers on a logistic regression.

``python -m benchmarks.parameter_server`` prints

- pulls and pushes of 10,000 rows of 64 floats at one server over loopback, by clients in processes of their
  own, beside pipelines of ``MGET`` and ``MSET`` of as many values at a redis-server (the package redis). The
  CPU of both sides is printed too: it says what a machine that does nothing else would do;
- logistic regression on 10⁶ sparse features (seeded; features by a power law), 4 workers, 2 servers: the
  loss in mode sync beside that of one process without servers, in mode geo (k = 16) with the bytes of both,
  and in mode async with the histogram of staleness;
- the same model by 1, 2 and 4 processes that update shared memory without locks (Hogwild).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, WIDTH, KEYS = 10_000, 64, 100_000
FEATURES, PER_SAMPLE = 10**6, 32
TAIL = 0.2
"""The power of features: P(rank > r) = r^-TAIL, so the first is an eighth of all, and most are rare."""
WORLD, SERVERS = 4, 2
TIMEOUT_S = 600.0


# -- rows per second -----------------------------------------------------------------------------------


def cycle_table(ps: Any, seed: int, seconds: float) -> tuple[int, float, float, float]:
    """Pull and push for so long; return rows, seconds of pulls, of pushes, and of this process's CPU."""
    import numpy as np

    table = ps.table("rows")
    rng = np.random.default_rng(seed)
    batches = [rng.choice(KEYS, ROWS, replace=False) for _ in range(8)]
    gradients = rng.standard_normal((ROWS, WIDTH), np.float32)
    for keys in batches:
        table.pull(keys)
    rows, pulling_s, pushing_s = 0, 0.0, 0.0
    cpu_s = time.process_time()
    end_s = time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        keys = batches[rows // ROWS % len(batches)]
        table.pull(keys)
        middle_s = time.perf_counter()
        table.push(keys, gradients)
        pulling_s += middle_s - began_s
        pushing_s += time.perf_counter() - middle_s
        rows += 2 * ROWS
    return rows, pulling_s, pushing_s, time.process_time() - cpu_s


def cycle_redis(port: int, seed: int, seconds: float) -> tuple[int, float, float, float]:
    """Do the same by MGET and MSET of values of 256 bytes; the client adds nothing up."""
    import numpy as np
    import redis

    client = redis.Redis(port=port)
    rng = np.random.default_rng(seed)
    batches = [rng.choice(KEYS, ROWS, replace=False) for _ in range(8)]
    value = rng.standard_normal((ROWS, WIDTH), np.float32)
    rows, pulling_s, pushing_s = 0, 0.0, 0.0
    cpu_s = time.process_time()
    end_s = time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        keys = batches[rows // ROWS % len(batches)]
        names = [key.tobytes() for key in keys]
        pipeline = client.pipeline(transaction=False)
        for start in range(0, ROWS, 1000):
            pipeline.mget(names[start : start + 1000])
        np.frombuffer(b"".join(v or bytes(4 * WIDTH) for some in pipeline.execute() for v in some))
        middle_s = time.perf_counter()
        pipeline = client.pipeline(transaction=False)
        for start in range(0, ROWS, 1000):
            some = range(start, start + 1000)
            pipeline.mset({names[one]: value[one].tobytes() for one in some})
        pipeline.execute()
        pulling_s += middle_s - began_s
        pushing_s += time.perf_counter() - middle_s
        rows += 2 * ROWS
    return rows, pulling_s, pushing_s, time.process_time() - cpu_s


def find_pid(port: int) -> int:
    """Return the process that listens on a port of loopback."""
    import redis

    pid: int = redis.Redis(port=port).info("server")["process_id"]
    return pid


def measure_rows(seconds: float, clients: list[int]) -> None:
    """Print rows/s of one server, and of Redis, beside each other."""
    import psutil

    import stoker
    from tests.services import RedisServer

    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer(Path(folder))
        redis.start()
        redis_pid = find_pid(redis.port)
        try:
            for optimizer in (stoker.ps.SGD(0.01), stoker.ps.Adagrad(0.01)):
                ps = stoker.ps.start(1, name="bench", num_cpus=0, save_interval_s=None)
                ps.sparse("rows", WIDTH, optimizer=optimizer)
                server_pid = ps.statistics()["pids"][0]
                for count in clients:
                    for title, function, target in (
                        (f"one server, {type(optimizer).__name__}", cycle_table, ps),
                        ("Redis MGET, MSET", cycle_redis, redis.port),
                    ):
                        task = stoker.remote(num_cpus=0)(function)
                        pid = server_pid if function is cycle_table else redis_pid
                        server = psutil.Process(pid)
                        before_s = sum(server.cpu_times()[:2])
                        refs = [task.remote(target, seed, seconds) for seed in range(count)]
                        found = stoker.get(refs, timeout=TIMEOUT_S)
                        server_s = sum(server.cpu_times()[:2]) - before_s
                        cycles = sum(one[0] for one in found) / 2 / ROWS
                        rate = sum(one[0] / (one[1] + one[2]) for one in found)
                        each_ms = [1e3 * sum(one[at] for one in found) / cycles for at in (1, 2, 3)]
                        print(
                            f"{title:20} {count} clients {rate / 1e6:6.2f} M rows/s"
                            f"   pull {each_ms[0]:6.2f} ms, push {each_ms[1]:6.2f} ms"
                            f"   CPU of a client {each_ms[2]:6.2f} ms,"
                            f" server {1e3 * server_s / cycles:6.2f} ms",
                            flush=True,
                        )
                ps.stop()
        finally:
            redis.stop()


# -- logistic regression -------------------------------------------------------------------------------


def samples(rank: int, count: int, seed: int) -> tuple[Any, Any]:
    """Return (count, PER_SAMPLE) features, by a power law over all of them, and labels of a true model."""
    import numpy as np

    rng = np.random.default_rng([seed, rank])
    uniform = rng.random((count, PER_SAMPLE))
    ranks = np.fmod(uniform ** (-1.0 / TAIL) - 1.0, FEATURES).astype(np.int64)
    features = (ranks * 2_654_435_761) % FEATURES
    weights = np.sin(features * 12.9898) * 1.5
    chance = 1.0 / (1.0 + np.exp(-weights.sum(1) / np.sqrt(PER_SAMPLE) * 2))
    return features, (rng.random(count) < chance).astype(np.float64)


def loss_and_gradient(rows: Any, labels: Any) -> tuple[float, Any]:
    """Return the mean log loss, and its gradient by each weight that was used."""
    import numpy as np

    logits = rows.sum(1)
    loss = float(np.mean(np.logaddexp(0.0, logits) - labels * logits))
    error = (1.0 / (1.0 + np.exp(-logits)) - labels) / labels.size
    return loss, np.broadcast_to(error[:, None], rows.shape)


def train(
    ps: Any, rank: int, mode: str, steps: int, size: int, seed: int
) -> tuple[int, dict[str, Any]]:
    """Train as a worker; return the bytes that it sent and received."""
    worker = ps.worker(rank, WORLD, mode=mode, staleness=4 if mode == "async" else None, k=16)
    features, labels = samples(rank, 2 * size, seed)
    for step in range(steps):
        at = slice(step % 2 * size, (step % 2 + 1) * size)
        rows = worker.pull("weights", features[at])
        _, gradient = loss_and_gradient(rows[..., 0], labels[at])
        worker.push("weights", features[at], gradient[..., None])
        worker.step()
    sent = worker.nbytes
    worker.close()
    return sum(worker.nbytes), {"before the close": sum(sent)}


def train_alone(steps: int, size: int, seed: int, lr: float) -> float:
    """Train the same in one process, without servers; return the loss on all samples."""
    import numpy as np

    parts = [samples(rank, 2 * size, seed) for rank in range(WORLD)]
    weights = np.zeros(FEATURES)
    for step in range(steps):
        at = slice(step % 2 * size, (step % 2 + 1) * size)
        features = np.concatenate([one[0][at] for one in parts])
        labels = np.concatenate([one[1][at] for one in parts])
        _, gradient = loss_and_gradient(weights[features], labels)
        weights -= lr * np.bincount(features.ravel(), gradient.ravel(), FEATURES)
    return final_loss(parts, weights.__getitem__)


def final_loss(parts: list[tuple[Any, Any]], weights: Any) -> float:
    """Return the loss on all samples."""
    return statistics.mean(
        loss_and_gradient(weights(features), labels)[0] for features, labels in parts
    )


def measure_regression(steps: int, size: int, seed: int, lr: float) -> None:
    """Print losses and bytes of all modes."""
    import stoker

    parts = [samples(rank, 2 * size, seed) for rank in range(WORLD)]
    used = len({*(key for one in parts for key in one[0].ravel().tolist())})
    print(
        f"\n{WORLD} workers, {SERVERS} servers, {steps} steps of {size} x {PER_SAMPLE} of {FEATURES} features"
    )
    print(f"{used} features are used; the loss without training is 0.69315")
    alone = train_alone(steps, size, seed, lr)
    print(f"one process   loss {alone:.6f}", flush=True)
    bytes_of: dict[str, int] = {}
    for mode in ("sync", "geo", "async"):
        ps = stoker.ps.start(SERVERS, name=mode, num_cpus=0)
        # An async worker applies its gradient whole, a sync one its share of the mean.
        scale = 1.0 / WORLD if mode == "async" else 1.0
        table = ps.sparse(
            "weights", 1, optimizer=stoker.ps.SGD(lr * scale), initializer=stoker.ps.Zeros()
        )
        task = stoker.remote(num_cpus=0)(train)
        began_s = time.perf_counter()
        refs = [task.remote(ps, rank, mode, steps, size, seed) for rank in range(WORLD)]
        bytes_of[mode] = sum(one[0] for one in stoker.get(refs, timeout=TIMEOUT_S))
        took_s = time.perf_counter() - began_s
        loss = final_loss(parts, lambda keys, of=table: of.pull(keys, create=False)[..., 0])
        said = f"{mode:5}         loss {loss:.6f} ({loss / alone - 1:+.2e})"
        said += f"  {bytes_of[mode] / 1e6:8.2f} MB  {took_s:.1f} s"
        if mode == "geo":
            said += f"  bytes of sync / {bytes_of['sync'] / bytes_of['geo']:.1f}"
        if mode == "async":
            said += f"  staleness {ps.statistics()['staleness']}"
        print(said, flush=True)
        ps.stop()


# -- Hogwild -------------------------------------------------------------------------------------------


def descend(weights: Any, number: int, processes: int, seed: int, lr: float) -> float:
    """Do a process's share of small steps on shared weights, without locks; return its seconds."""
    import numpy as np

    features, labels = samples(0, 40_000, seed)
    array = weights.array
    began_s = time.perf_counter()
    for start in range(number * 16, labels.size, 16 * processes):
        some = features[start : start + 16]
        _, gradient = loss_and_gradient(array[some], labels[start : start + 16])
        np.subtract.at(array, some, lr * gradient)
    return time.perf_counter() - began_s


def measure_hogwild(seed: int, lr: float) -> None:
    """Print the loss of one process, and of several that write the same weights."""
    import stoker

    data = samples(0, 40_000, seed)
    print("\nHogwild: 40,000 samples in steps of 16, on weights in shared memory")
    task = stoker.remote(num_cpus=0)(descend)
    serial = 0.0
    for processes in (1, 2, 4):
        weights = stoker.ps.shared(FEATURES, "float64")
        refs = [task.remote(weights, one, processes, seed, lr) for one in range(processes)]
        took_s = max(stoker.get(refs, timeout=TIMEOUT_S))
        loss = final_loss([data], weights.array.__getitem__)
        serial = serial or loss
        print(
            f"{processes} processes   loss {loss:.6f} ({loss / serial - 1:+.2e})   {took_s:.2f} s",
            flush=True,
        )


def main() -> int:
    """Measure all of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parameter_server", description=__doc__
    )
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of each measurement of rows (3)"
    )
    parser.add_argument(
        "--clients", type=int, action="append", help="number of clients (1, 2 and 4)"
    )
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--size", type=int, default=2048, help="samples of a worker's step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--only", choices=("rows", "regression", "hogwild"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import stoker

    stoker.init(num_cpus=8, num_gpus=0, log_to_driver=False)
    try:
        if options.only in (None, "rows"):
            measure_rows(options.seconds, options.clients or [1, 2, 4])
        if options.only in (None, "regression"):
            measure_regression(options.steps, options.size, options.seed, options.lr)
        if options.only in (None, "hogwild"):
            measure_hogwild(options.seed, options.lr / 4)
    finally:
        stoker.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
