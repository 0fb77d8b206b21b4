"""One of the processes of test_kfac: three K-FAC steps with DDP over gloo, on its part of a batch.

python kfac_worker.py RANK WORKERS INIT_FILE OUT
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

# Imported while there is no group: its default arguments would keep it, and its threads abort the exit.
import torch.distributed.nn.functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker_kernels.optim import KFAC

STEPS, BATCH = 3, 12


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator)
    return x, torch.randint(0, 3, (BATCH,), generator=generator)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class PartlyCalled(nn.Module):
    """A net that uses ``loose.weight`` without calling ``loose``, and so ``last`` every other time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.loose, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(nn.functional.linear(x, self.loose.weight, self.loose.bias))
        self.passes += 1
        if self.passes % 2:
            return cast("torch.Tensor", self.last(x))
        return nn.functional.linear(x, self.last.weight, self.last.bias)


def train(model: nn.Module, optimizer: KFAC, part: slice) -> None:
    for step in range(STEPS):
        x, y = batch_of(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def main() -> None:
    rank, workers, meet, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=workers,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    model = DistributedDataParallel(PartlyCalled())
    optimizer = KFAC(model.module, lr=0.1, inverse_every=1)
    share = BATCH // workers
    train(model, optimizer, slice(rank * share, (rank + 1) * share))
    torch.save([p.detach() for p in model.parameters()], out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
