"""One of the processes of test_ddp_hook: trains a small model with DDP over gloo by each method.

python ddp_worker.py RANK WORKERS INIT_FILE OUT METHOD[,METHOD...]
"""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Imported while there is no group: its default arguments would keep it, and its threads abort the exit.
import torch.distributed.nn.functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker_kernels.compression import HookState, OneBitAdam, compression_hook, make_compressor

OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"ratio": 0.05},
    "dgc": {"ratio": 0.05, "momentum": 0.0},
    "sidco": {"ratio": 0.05},
    "onebit_adam": {"freeze": 10},
    "powersgd": {"rank": 2},
    "csc": {"ratio": 0.2, "chunk": 64},
}
STEPS = 40


def train(rank: int, method: str) -> dict[str, Any]:
    """Fit a small network; both workers see different data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)  # several buckets
    compressor = make_compressor(method, **OPTIONS.get(method, {}))
    state = HookState(compressor, model.named_parameters())
    ddp.register_comm_hook(state, compression_hook)
    if method == "onebit_adam":
        optimizer: torch.optim.Optimizer = OneBitAdam(model.parameters(), lr=0.005, freeze=10)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    teacher = torch.randn(16, 4)
    generator = torch.Generator().manual_seed(1 + rank)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(64, 16, generator=generator)
        loss = (ddp(x) - x @ teacher).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "sent_nbytes": state.sent_nbytes,
        "names": sorted(state.state_dict()["steps"]),
        "steps": compressor.step_of("0.weight"),
    }


def thread_names() -> list[str]:
    """The names of this process's threads."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            names.append(path.read_text())
    return names


if __name__ == "__main__":
    rank, workers, init_file, out, methods = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init_file}",
        rank=int(rank),
        world_size=int(workers),
        timeout=timedelta(seconds=30),
    )
    results = {method: train(int(rank), method) for method in methods.split(",")}
    dist.destroy_process_group()
    threads_left = [name for name in thread_names() if name.startswith("pt_gloo")]
    torch.save({"results": results, "threads_left": threads_left}, out)
