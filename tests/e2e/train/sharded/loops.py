"""Loops of sharded jobs for the tests beside this, and the same training in one process."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

WIDTH, SAMPLES, BATCH = 8, 68, 16
"""Four samples of an epoch make no whole batch."""


def make_model() -> nn.Module:
    """Return a chain of layers; the same numbers each time."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def make_data() -> torch.utils.data.Dataset[Any]:
    """Return numbered samples with a target that can be learned."""
    points = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(
        torch.arange(SAMPLES), points, points.sum(1, keepdim=True)
    )


def mse(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean of the squared errors."""
    return nn.functional.mse_loss(output, targets)


def noted(ctx: Any, config: dict[str, Any]) -> list[float]:
    """Train, noting each step of each rank in a file; returns the losses of this gang by step."""
    # Tensor parallelism cuts the first two layers; what is not named stays whole.
    cut = {"0": "colwise", "2": "rowwise"} if ctx.plan.tensor > 1 else None
    model = ctx.parallelize(make_model(), tensor_plan=cut)
    optimizer = torch.optim.AdamW(ctx.parameters(model), lr=1e-2)
    ctx.state(model=model, optimizer=optimizer, max_norm=config.get("max_norm"))
    loader = ctx.loader(make_data())
    folder, losses = Path(config["folder"]), []
    for _ in ctx.epochs(config["epochs"]):
        for numbers, points, targets in loader:
            if ctx.step_number == config.get("raise_at") and ctx.rank == ctx.world_size - 1:
                raise ZeroDivisionError("the loop's own")
            if [ctx.step_number, ctx.rank] == config.get("dies_at"):
                _die_once(folder)
            if ctx.step_number == config.get("hang_at") and ctx.rank == 0:
                time.sleep(3600.0)
            loss = float(ctx.forward_backward(points, targets, mse))
            step, epoch = ctx.step_number, ctx.epoch
            line = {
                "rank": ctx.rank,
                "data": ctx.data_rank,
                "step": step,
                "epoch": epoch,
                "loss": loss,
                "seen": numbers.tolist(),
                "pid": os.getpid(),
                "at_s": time.time(),
            }
            with (folder / f"{ctx.rank}-{os.getpid()}").open("a") as file:
                file.write(json.dumps(line) + "\n")
            losses.append(loss)
            ctx.step(loss=loss)
            if config.get("pause_s"):
                time.sleep(config["pause_s"])
    return losses


def _die_once(folder: Path) -> None:
    flag = folder.with_name("died")
    if not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def notes(folder: Path) -> list[dict[str, Any]]:
    """Return what all ranks have noted, in order of time; a line that is being written is left out."""
    found = []
    for path in folder.iterdir():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                found.append(json.loads(line))
    return sorted(found, key=lambda one: one["at_s"])


def alone(epochs: int, max_norm: float | None = None) -> list[float]:
    """Return the losses of the same training in this process."""
    from stoker_train.elastic.core.sampler import epoch_order

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, losses = make_data(), []
    for epoch in range(epochs):
        order = epoch_order(SAMPLES, 0, epoch, True)
        for first in range(0, SAMPLES - SAMPLES % BATCH, BATCH):
            rows = [data[int(n)] for n in order[first : first + BATCH]]
            loss = mse(
                model(torch.stack([row[1] for row in rows])), torch.stack([row[2] for row in rows])
            )
            loss.backward()  # type: ignore[no-untyped-call]
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses
