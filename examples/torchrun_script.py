"""A script as torchrun runs it, elastic: it saves a checkpoint, and goes on from it with other nodes.

    torchrun --nproc-per-node 2 examples/torchrun_script.py
    stoker launch --nnodes 1:4 examples/torchrun_script.py --out /shared/run     # on a cluster

Nothing in it knows of Stoker. Each time that nodes come or go all workers are restarted: LOCAL_RANK, RANK and
WORLD_SIZE are new then, and the checkpoint says how far the last ones came.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

BATCH = 64
"""Samples of a step, over all workers: with any number of them the same."""


def samples(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of a step's batch, which is a function of the step alone."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 16, generator=made)
    y = x.square().sum(dim=1, keepdim=True)
    return x[rank::world], y[rank::world]


def save(path: Path, state: dict[str, object]) -> None:
    """Replace the checkpoint whole: a worker may be stopped at any time."""
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


@record  # an error is told with its traceback and rank
def main() -> None:
    """Train to the last step."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--out", type=Path, default=Path("/tmp/torchrun_script"))
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    checkpoint = given.out / "checkpoint.pt"

    has_gpu = torch.cuda.is_available()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")

    layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if rank == 0:
        print(f"{world} workers, from step {first}, after {restarts} restarts", flush=True)
    ddp = DistributedDataParallel(model)
    for step in range(first, given.steps):
        x, y = (one.to(device) for one in samples(step, rank, world))
        optimizer.zero_grad()
        # The mean over the whole batch: shares may differ by one sample.
        loss = (ddp(x) - y).square().sum() * world / BATCH
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save(checkpoint, {**state, "step": step + 1})
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
