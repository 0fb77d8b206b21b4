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

from stoker_kernels.compression import (
    HookState,
    OneBitAdam,
    TorchGroup,
    compression_hook,
    make_compressor,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"ratio": 0.05},
    "dgc": {"ratio": 0.05, "momentum": 0.0},
    "sidco": {"ratio": 0.05},
    "onebit_adam": {"freeze": 10},
    "powersgd": {"rank": 2},
    "csc": {"ratio": 0.2, "chunk": 64},
}
STEPS = 40


def train(
    rank: int, method: str, *, overlap: bool = True, steps: int = STEPS, bucket_mb: float = 0.002
) -> dict[str, Any]:
    """Fit a small network; both workers see different data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    compressor = make_compressor(method, **OPTIONS.get(method, {}))
    state = HookState(compressor, model.named_parameters(), overlap=overlap)
    order = watch(state, model[0])
    ddp.register_comm_hook(state, compression_hook)
    if method == "onebit_adam":
        optimizer: torch.optim.Optimizer = OneBitAdam(model.parameters(), lr=0.005, freeze=10)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    teacher = torch.randn(16, 4)
    generator = torch.Generator().manual_seed(1 + rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 16, generator=generator)
        loss = (ddp(x) - x @ teacher).square().mean()
        optimizer.zero_grad()
        order.clear()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "parameters": {name: p.detach() for name, p in model.named_parameters()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "sent_nbytes": state.sent_nbytes,
        "order": list(order),
        "names": sorted(state.state_dict()["steps"]),
        "steps": compressor.step_of("0.weight"),
    }


def watch(state: HookState, first: nn.Linear) -> list[str]:
    """What a backward pass does, in order: the starts of buckets, the first layer's gradient, the waits."""
    order: list[str] = []
    group = state.exchange.group
    assert isinstance(group, TorchGroup)
    start_mean, start_gather = group.start_mean, group.start_gather

    def waiting(wait: Any) -> Any:
        def logged() -> None:
            order.append("wait")
            wait()

        return logged

    def logged_mean(buffer: torch.Tensor) -> Any:
        order.append("start")
        return waiting(start_mean(buffer))

    def logged_gather(buffer: torch.Tensor) -> Any:
        order.append("start")
        received, wait = start_gather(buffer)
        return received, waiting(wait)

    group.start_mean, group.start_gather = logged_mean, logged_gather  # type: ignore[method-assign]
    first.weight.register_hook(lambda gradient: order.append("first layer"))
    return order


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
    for method in ("topk", "powersgd"):
        for overlap in (True, False):
            name = f"{method}, {'overlapped' if overlap else 'waiting'}"
            results[name] = train(  # a bucket for each layer
                int(rank), method, overlap=overlap, steps=4, bucket_mb=0.0005
            )
    dist.destroy_process_group()
    threads_left = [name for name in thread_names() if name.startswith("pt_gloo")]
    torch.save({"results": results, "threads_left": threads_left}, out)
