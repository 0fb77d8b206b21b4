"""One of the processes of test_optim_sharded: FSDP2 models, stepped by our optimizers and by torch's.

python fsdp_worker.py RANK WORKERS INIT_FILE FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# Imported while there is no group: its default arguments would keep it, and its threads abort the exit.
import torch.distributed.nn.functional
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import stoker_kernels as ours
from stoker_kernels import InBackward

STEPS = 20
MAX_NORM = 0.05
ADAM = {"lr": 1e-2, "weight_decay": 0.1}
PAIRS: dict[str, tuple[Any, Any]] = {
    "adamw": (partial(ours.AdamW, **ADAM), partial(torch.optim.AdamW, **ADAM)),
    "adam": (partial(ours.Adam, lr=1e-2), partial(torch.optim.Adam, lr=1e-2)),
    "sgd": (
        partial(ours.SGD, lr=1e-2, momentum=0.9),
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    ),
    "adagrad": (partial(ours.Adagrad, lr=1e-2), partial(torch.optim.Adagrad, lr=1e-2)),
    "adadelta": (ours.Adadelta, torch.optim.Adadelta),
    "rmsprop": (
        partial(ours.RMSprop, lr=1e-3, momentum=0.5),
        partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
    ),
}
Make = Callable[[Any], torch.optim.Optimizer]


def network() -> nn.Sequential:
    """A model whose tensors do not divide by 4: some shards are smaller, some empty."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def whole(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter, gathered."""
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(8, 6, generator=generator)
    return (model(x) - x[:, :3].sin()).square().mean()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, clip: bool = False
) -> list[torch.Tensor]:
    """The norm of each step's gradients, as torch or the optimizer measured it."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            norms.append(norm.full_tensor())
        optimizer.step()
        if isinstance(optimizer, ours.AdamW | ours.SGD | ours.LAMB | ours.LARS):
            norms.append(optimizer.grad_square_sum.sqrt())
    return norms


def as_torch(mesh: DeviceMesh, rank: int, results: dict[str, Any]) -> None:
    """The same 20 steps by torch's optimizer and by ours, on data that differs between the processes."""
    for name, (make, theirs) in PAIRS.items():
        finals = []
        for kind in (make, theirs):
            model = sharded(mesh)
            train(model, kind(model.parameters()), range(STEPS), rank)
            finals.append(whole(model))
        results[name] = finals


def clipped(mesh: DeviceMesh, rank: int, results: dict[str, Any]) -> None:
    for name in ("adamw", "sgd"):
        make, theirs = PAIRS[name]
        model, other = sharded(mesh), sharded(mesh)
        optimizer = make(model.parameters(), max_grad_norm=MAX_NORM)
        norms = train(model, optimizer, range(STEPS), rank)
        other_norms = train(other, theirs(other.parameters()), range(STEPS), rank, clip=True)
        results[f"{name}_clipped"] = [whole(model), whole(other)]
        results[f"{name}_norms"] = [norms, other_norms]


def trust(mesh: DeviceMesh, results: dict[str, Any]) -> None:
    """LAMB and LARS against themselves unsharded: the same data everywhere, so the same gradients."""
    for name, make in (
        ("lamb", partial(ours.LAMB, lr=1e-2)),
        ("lars", partial(ours.LARS, lr=1.0, trust_coefficient=0.01, weight_decay=0.1)),
        ("lamb_clipped", partial(ours.LAMB, lr=1e-2, max_grad_norm=MAX_NORM)),
    ):
        model, plain = sharded(mesh), network()
        norms = train(model, make(model.parameters()), range(STEPS), 0)
        plain_norms = train(plain, make(plain.parameters()), range(STEPS), 0)
        results[name] = [whole(model), whole(plain)]
        results[f"{name}_norms"] = [norms, plain_norms]


def stored(mesh: DeviceMesh, rank: int, folder: str, results: dict[str, Any]) -> None:
    """A checkpoint by torch.distributed.checkpoint: whoever loads it goes on bit for bit."""
    model = sharded(mesh)
    optimizer = ours.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(3), rank)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    train(model, optimizer, range(3, 6), rank)
    other = sharded(mesh)
    fresh = ours.AdamW(other.parameters(), lr=1e-2)
    state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, fresh)}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, fresh, state["optimizer"])
    train(other, fresh, range(3, 6), rank)
    results["stored"] = [whole(model), whole(other)]
    # To and from torch, by the optimizers' own state dicts.
    moved = torch.optim.AdamW(other.parameters(), lr=1e-2, weight_decay=0.01)
    groups = moved.state_dict()["param_groups"]
    moved.load_state_dict({"state": fresh.state_dict()["state"], "param_groups": groups})
    train(other, moved, range(6, 8), rank)
    back = ours.AdamW(other.parameters(), lr=1e-2)
    back.load_state_dict(moved.state_dict())
    train(other, back, range(8, 10), rank)
    train(model, optimizer, range(6, 10), rank)
    results["moved"] = [whole(model), whole(other)]


def in_backward(mesh: DeviceMesh, rank: int, results: dict[str, Any]) -> None:
    model, other = sharded(mesh), sharded(mesh)
    optimizer = ours.LAMB(model.parameters())
    attached = InBackward(ours.LAMB(other.parameters()), bucket_nbytes=100)
    for step in range(5):
        loss_of(other, step, rank).backward()
        assert all(p.grad is None for p in other.parameters())
    train(model, optimizer, range(5), rank)
    results["in_backward"] = [whole(model), whole(other)]
    sums = optimizer.grad_square_sums, attached.optimizer.grad_square_sums
    results["in_backward_sums"] = [list(sums[:1]), list(sums[1:])]


def refusals(mesh: DeviceMesh, results: dict[str, Any]) -> None:
    model, plain = sharded(mesh), network()
    results["refusals"] = {}
    optimizer = ours.AdamW(plain.parameters())
    loss_of(plain, 0).backward()
    optimizer.step()
    sharded_optimizer = ours.AdamW(model.parameters())
    try:
        sharded_optimizer.load_state_dict(optimizer.state_dict())
    except TypeError as error:
        results["refusals"]["load"] = str(error)


def rounded(mesh: DeviceMesh, results: dict[str, Any]) -> None:
    """Which values of a row of ones each shard rounded down: shards must not draw alike."""
    model = nn.Linear(64, 8, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    fully_shard(model, mesh=mesh)
    optimizer = ours.SGD(model.parameters(), lr=2.0**-9, stochastic_rounding=True)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    results["rounded"] = model.weight.full_tensor().detach().float()


if __name__ == "__main__":
    rank, workers, init_file, folder = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init_file}",
        rank=int(rank),
        world_size=int(workers),
        timeout=timedelta(seconds=120),
    )
    results: dict[str, Any] = {}
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    as_torch(line, int(rank), results)
    for mesh, name in ((line, "line"), (square, "square")):
        inner: dict[str, Any] = {}
        clipped(mesh, int(rank), inner)
        trust(mesh, inner)
        rounded(mesh, inner)
        results |= {f"{name}_{key}": value for key, value in inner.items()}
    stored(line, int(rank), str(Path(folder) / "checkpoint"), results)
    in_backward(line, int(rank), results)
    refusals(line, results)
    dist.barrier()
    dist.destroy_process_group()
    if rank == "0":
        torch.save(results, Path(folder) / "results.pt")
