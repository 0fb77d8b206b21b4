"""``python -m benchmarks.kernels.ddp_hook``: a step under DDP with our hook, beside plain DDP, over gloo.

Two processes train one model each way in turn, step by step, so that other programs disturb all ways alike:
averaged by DDP itself, and compressed by the hook, beside the backward pass and after each bucket. Bytes
are those of a worker's messages in a step; DDP's own are one gradient. Loopback is no network: what
compression saves on a link, ``compression`` calculates.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # while there is no group: its default arguments would keep it
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker_kernels.compression import HookState, compression_hook, make_compressor

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS, WARM_UP, DEADLINE_S = 2, 2, 600
WIDTH, LAYERS, BATCH = 1024, 10, 64  # 10.5 million parameters
WAYS: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("DDP, no hook", "", {}, True),
    ("fp16", "fp16", {}, True),
    ("topk ratio=0.01", "topk", {"ratio": 0.01}, True),
    ("topk ratio=0.01, bucket after bucket", "topk", {"ratio": 0.01}, False),
    ("powersgd rank=4", "powersgd", {"rank": 4}, True),
)


def _way(method: str, options: dict[str, Any], overlap: bool) -> tuple[nn.Module, HookState | None]:
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    ddp = DistributedDataParallel(model, bucket_cap_mb=8)
    if not method:
        return ddp, None
    state = HookState(make_compressor(method, **options), model.named_parameters(), overlap=overlap)
    ddp.register_comm_hook(state, compression_hook)
    return ddp, state


def _stepper(ddp: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        loss = ddp(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return time.perf_counter() - began

    return step


def worker(rank: int, meet: str, steps: int) -> None:
    """Measure; rank 0 prints a row of Markdown for each way."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=WORKERS,
        timeout=timedelta(seconds=DEADLINE_S),
    )  # fmt: skip
    torch.manual_seed(1 + rank)
    x = torch.randn(BATCH, WIDTH)
    made = [_way(method, options, overlap) for _, method, options, overlap in WAYS]
    steppers = [_stepper(ddp, x) for ddp, _ in made]
    times: list[list[float]] = [[] for _ in WAYS]
    for _ in range(WARM_UP + steps):
        for taken, step in zip(times, steppers, strict=True):
            taken.append(step())
    nbytes = 4 * sum(parameter.numel() for parameter in made[0][0].parameters())
    for (label, *_), (_, state), taken in zip(WAYS, made, times, strict=True):
        sent = nbytes if state is None else state.sent_nbytes / (WARM_UP + steps)
        low, middle = min(taken[WARM_UP:]), statistics.median(taken[WARM_UP:])
        if rank == 0:
            row = f"| {label} | {sent / 1e6:.2f} | {1e3 * middle:.0f} | {1e3 * low:.0f} |\n"
            sys.stdout.write(row)
    steppers.clear()
    made.clear()  # DDP holds the group
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Start the processes and wait for them."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.ddp_hook", description=__doc__
    )
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--meet", help=argparse.SUPPRESS)
    options = made.parse_args(argv)
    if options.rank is not None:
        worker(options.rank, options.meet, options.steps)
        return 0
    load = os.getloadavg()[0]
    sys.stdout.write(f"load {load:.1f} on {os.cpu_count()} cores before the run\n\n")
    sys.stdout.write(
        "| way | MB sent in a step | ms, median | ms, fastest |\n|---|---:|---:|---:|\n"
    )
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.kernels.ddp_hook",
            "--steps",
            str(options.steps),
        ]
        command += ["--meet", str(Path(folder) / "meet"), "--rank"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([*command, str(r)], env=environment) for r in range(WORKERS)]
        try:
            codes = [process.wait(timeout=DEADLINE_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return max(map(abs, codes))


if __name__ == "__main__":
    raise SystemExit(main())
