"""How long a sharded job does not commit after one of its ranks is killed, and what it does again.

    python -m benchmarks.sharded restart [--kills 10]

A job of 2 x 2 ranks (data, tensor) on this machine's CPUs commits within every 5 steps; a random rank gets
SIGKILL, time after time. Shown: the seconds to the next checkpoint that counts, and the steps that were made
again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import Row

EVERY = 5
WAIT_S = 120.0


def loop(ctx: Any, config: dict[str, Any]) -> None:
    """Train a small model until it is stopped, noting each step."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    model = ctx.parallelize(model, tensor_plan={"0": "colwise", "2": "rowwise"})
    optimizer = torch.optim.AdamW(ctx.parameters(model), lr=1e-3)
    ctx.state(model=model, optimizer=optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(4096, 64))
    for _ in ctx.epochs(1_000_000):
        for (points,) in ctx.loader(data):
            loss = ctx.forward_backward(points, points, torch.nn.functional.mse_loss)
            if ctx.rank == 0:
                with Path(config["notes"]).open("a") as file:
                    file.write(f"{ctx.step_number}\n")
            ctx.step(loss=loss)
            time.sleep(0.02)


def run(arguments: list[str]) -> list[Row]:
    """Run it, and return what was measured."""
    import stoker
    from stoker.train import Checkpoint, Failure, ShardedTrainer, Strategy
    from stoker_train.sharded.checkpoints.layout import checkpoints_in

    parser = argparse.ArgumentParser(prog="restart")
    parser.add_argument("--kills", type=int, default=10)
    kills = parser.parse_args(arguments).kills
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = Path(tempfile.mkdtemp())
    os.environ.setdefault("STOKER_SESSION_ROOT", str(folder / "session"))
    stoker.init(num_cpus=6, num_gpus=0, log_to_driver=False)
    trainer = ShardedTrainer(
        loop,
        plan=Strategy(data=2, tensor=2, zero=2),
        batch=16,
        resources={"CPU": 1},
        config={"notes": str(folder / "steps")},
        checkpoint=Checkpoint(str(folder / "checkpoints"), every=EVERY),
        failure=Failure(retries=3),
    )
    trainer.submit()

    def newest(after: int) -> tuple[int, int]:
        """Return gang and step of the newest checkpoint, of a gang above ``after``."""
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            found = checkpoints_in(folder / "checkpoints")
            if found and found[-1].manifest.attempt > after:
                return found[-1].manifest.attempt, found[-1].step
            time.sleep(0.005)
        raise TimeoutError(f"no checkpoint within {WAIT_S} s: {trainer.progress()}")

    took_s, again = [], []
    gang = 0
    for number in range(kills):
        gang, _ = newest(gang)
        time.sleep(1.0)  # progress() has the pids of this gang, and steps go on
        ranks = trainer.progress()["ranks"]
        before = len((folder / "steps").read_text().split())
        committed = newest(gang - 1)[1]
        began_s = time.monotonic()
        os.kill(random.choice(ranks)["pid"], signal.SIGKILL)
        newest(gang)
        took_s.append(time.monotonic() - began_s)
        steps = [int(one) for one in (folder / "steps").read_text().split()]
        last = max(steps[: before + 1])
        again.append(sum(one <= last for one in steps[before + 1 :]))
        print(
            f"kill {number}: {took_s[-1]:.2f} s, of {last} steps {committed} committed, "
            f"{again[-1]} made again, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    print(
        f"{kills} kills: p50 {statistics.median(took_s):.2f} s, most {max(took_s):.2f} s; "
        f"again at most {max(again)} steps of an interval of {EVERY}"
    )
    trainer.stop()
    trainer.result(WAIT_S)
    stoker.shutdown()
    return [
        Row(
            "restart, SIGKILL of a rank to the next commit, median", statistics.median(took_s), "s"
        ),
        Row("restart, the same, longest", max(took_s), "s"),
        Row(f"restart, steps made again, most, of an interval of {EVERY}", max(again), "steps"),
    ]
