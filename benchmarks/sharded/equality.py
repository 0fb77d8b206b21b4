"""The losses of sharded training beside those of one process, the states that a rank has, and what it sends.

    python -m benchmarks.sharded equality [--steps 20]

Processes with gloo train a small GPT in fp32, each plan from the same weights on the same batches. There is
no peer: the same model in one process is the measure. Prints the greatest relative difference of a loss, the
bytes of optimizer states of a rank over 1/N of the whole, and the bytes that a rank sends in a step, over
those of P bytes of parameters by the ring's convention, P (n - 1) / n.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.results import Row
from stoker_kernels import AdamW
from stoker_kernels.models import GPT, GPTConfig
from stoker_train.planning.strategy import Strategy
from stoker_train.sharded.parallel import traffic
from stoker_train.sharded.parallel.apply import micro_batch, parallelize
from stoker_train.sharded.parallel.mesh import DATA, TENSOR, device_mesh
from stoker_train.sharded.parallel.offload import state_nbytes

BATCH, SEQ_LEN = 8, 64
TIMEOUT_S = 120.0
WANTED = {"zero": 1e-6, "tensor": 1e-5, "state": 0.02}
"""The greatest relative difference of a loss, and of the bytes of states from 1/N."""
STRATEGIES = {
    "zero1": Strategy(data=4, zero=1, micro_batch=2),
    "zero2": Strategy(data=4, zero=2, micro_batch=2),
    "zero3": Strategy(data=4, zero=3, micro_batch=2),
    "zero1_2_micro_batches": Strategy(data=4, zero=1, micro_batches=2),
    "zero2_2_micro_batches": Strategy(data=4, zero=2, micro_batches=2),
    "data": Strategy(data=4, micro_batch=2),
    "tp2": Strategy(tensor=2, micro_batch=8),
    "tp2_sp": Strategy(tensor=2, sequence=True, micro_batch=8),
    "tp4": Strategy(tensor=4, micro_batch=8),
    "tp4_sp": Strategy(tensor=4, sequence=True, micro_batch=8),
    "zero1_tp2": Strategy(data=2, tensor=2, zero=1, micro_batch=4),
    "zero3_tp2": Strategy(data=2, tensor=2, zero=3, micro_batch=4),
    "zero3_tp2_sp": Strategy(data=2, tensor=2, zero=3, sequence=True, micro_batch=4),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rank saw of a training run: losses of the whole batches, bytes of states, bytes of a step."""

    losses: list[float]
    parameter_nbytes: int
    whole_nbytes: int
    """Of parameters that each rank of a tensor group has."""
    state_nbytes: int
    payload: dict[tuple[str, str], int]
    sent: dict[str, float]


def make_model(seed: int = 0) -> GPT:
    """Return the model: 0.8 million parameters."""
    torch.manual_seed(seed)
    return GPT(GPTConfig(block_size=SEQ_LEN, full_logits=False))


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield inputs and targets (B, S)."""
    drawn = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(0, 256, (BATCH, SEQ_LEN + 1), generator=drawn)
        yield tokens[:, :-1], tokens[:, 1:]


def train_alone(steps: int) -> Outcome:
    """Train in this process."""
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    losses = []
    for inputs, targets in batches(steps):
        _, loss = model(inputs, targets)
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return Outcome(losses, nbytes, 0, state_nbytes(optimizer), {}, {})


def train(strategy: Strategy, steps: int) -> Outcome:
    """Train as a rank of the group that there is; what is sent is of the last step, without losses."""
    mesh = device_mesh(strategy, "cpu")
    model = parallelize(make_model(mesh.get_rank()), strategy, mesh)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    ranks, rank = strategy.data, mesh.get_local_rank(DATA)
    many = strategy.micro_batches
    losses, last = [], traffic.Traffic()
    for inputs, targets in batches(steps):
        own = zip(*(rows.chunk(ranks)[rank].chunk(many) for rows in (inputs, targets)), strict=True)
        total = torch.zeros(())
        with traffic.count(mesh) as counted:
            for number, (x, y) in enumerate(own):
                with micro_batch(model, last=number == many - 1):
                    loss = model(x, y)[1] / many
                    loss.backward()
                total += loss.detach()
        last = counted
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / strategy.gpus)
    nbytes = [p.numel() * p.element_size() for p in model.parameters()]
    whole = [
        n
        for n, p in zip(nbytes, model.parameters(), strict=True)
        if p.placements[-1].is_replicate()
    ]
    sent = {dim: last.total_sent(dim) for dim in (DATA, TENSOR)}
    return Outcome(losses, sum(nbytes), sum(whole), state_nbytes(optimizer), dict(last.bytes), sent)


def measure(steps: int) -> list[Row]:
    """Train by every plan; return the figures."""
    alone = train_alone(steps)
    rows = []
    with tempfile.TemporaryDirectory(prefix="stoker-equality-") as folder:
        for world in sorted({one.gpus for one in STRATEGIES.values()}):
            mp.spawn(_rank, (world, folder, steps), nprocs=world)  # type: ignore[no-untyped-call]
        outcomes = {
            name: torch.load(Path(folder) / f"{name}.pt", weights_only=False) for name in STRATEGIES
        }
    for name, strategy in STRATEGIES.items():
        rows += rows_of(name, strategy, outcomes[name], alone)
    for name in ("tp2", "tp4"):
        plain, cut = outcomes[name], outcomes[f"{name}_sp"]
        ranks = STRATEGIES[name].tensor
        # Gradients of parameters that all ranks have are added up besides.
        sums = 2 * cut.whole_nbytes * (ranks - 1) / ranks
        rows.append(Row(f"{name}_sp_over_tp", (cut.sent[TENSOR] - sums) / plain.sent[TENSOR], ""))
    return rows


def rows_of(name: str, strategy: Strategy, outcome: Outcome, alone: Outcome) -> list[Row]:
    """Return the figures of one plan."""
    pairs = zip(outcome.losses, alone.losses, strict=True)
    rows = [Row(f"{name}_loss", max(abs(a - b) / b for a, b in pairs), "relative")]
    if strategy.zero:
        part = outcome.state_nbytes * strategy.data * strategy.tensor / alone.state_nbytes
        rows.append(Row(f"{name}_state", part, "of 1/N"))
    for dim, ranks in ((DATA, strategy.data), (TENSOR, strategy.tensor)):
        if ranks > 1:
            whole = outcome.parameter_nbytes / (strategy.tensor if dim == DATA else 1)
            sent = outcome.sent[dim] / (whole * (ranks - 1) / ranks)
            rows.append(Row(f"{name}_sent_{dim}", sent, "P"))
    return rows


def _rank(rank: int, world: int, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{folder}/meet-{world}", world)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    for name, strategy in STRATEGIES.items():
        if strategy.gpus == world:
            outcome = train(strategy, steps)
            if rank == 0:
                torch.save(outcome, Path(folder) / f"{name}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(arguments: list[str]) -> list[Row]:
    """Measure; say which figures are as wanted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sharded equality")
    parser.add_argument("--steps", type=int, default=20)
    rows = measure(parser.parse_args(arguments).steps)
    for row in rows:
        if row.unit == "relative":
            wanted = WANTED["tensor" if "tp" in row.case else "zero"]
            word = "reached" if row.value <= wanted else "missed"
            print(f"{row.case}: wanted {wanted:g} or less: {word}", flush=True)
        elif row.unit == "of 1/N" and "tp" not in row.case:
            word = "reached" if abs(row.value - 1.0) <= WANTED["state"] else "missed"
            print(f"{row.case}: wanted 1 within {WANTED['state']:.0%}: {word}", flush=True)
    return rows
