"""The step times that the planner predicts beside those that are measured, for plans of two ranks.

    python -m benchmarks.sharded predicted [--plans 20] [--steps 6] [--rounds 2]

Two processes with one core each measure, both at once, the passes of a small GPT, collectives by gloo and the
optimizer; the planner costs every plan by these numbers; then each plan trains, in rounds that are a random
order of all. There is no peer: Ray and Dask plan no training. Prints both times of each plan, the median
error, and how far the planner's first plan is from the fastest that was measured.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.results import Row
from stoker_kernels.models import GPT
from stoker_kernels.models.config import TransformerConfig
from stoker_train.planning import ClusterShape, Link, Plan, Strategy, plan_strategy
from stoker_train.planning.profiles.profile import Profile
from stoker_train.planning.profiles.profiling import profile_model
from stoker_train.planning.strategy import Recompute
from stoker_train.sharded.parallel.apply import micro_batch, parallelize
from stoker_train.sharded.parallel.mesh import device_mesh
from stoker_train.sharded.pipelining.executor import Pipeline
from stoker_train.sharded.pipelining.splitting import cut_evenly, split

RANKS = 2
BATCH = 8
SEQ_LEN = 128
SIZES = (1 << 18, 1 << 23)
"""Bytes of the collectives that are timed: between them lie those of a layer."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the planner is told of the machine and the model."""

    profile: Profile
    cluster: ClusterShape


def config() -> TransformerConfig:
    """Return the model: 14 million parameters in 8 layers."""
    return TransformerConfig(
        vocab_size=512,
        layers=8,
        heads=6,
        dim=384,
        block_size=SEQ_LEN,
        tied=False,
        full_logits=False,
    )


def strategies() -> list[Strategy]:
    """Return the plans that fit two ranks and a batch of eight sequences."""
    data = [
        Strategy(data=2, zero=zero, micro_batch=size, micro_batches=BATCH // 2 // size)
        for zero, size in product((0, 1, 2, 3), (1, 2, 4))
    ]
    tensor = [
        Strategy(tensor=2, sequence=sequence, micro_batch=size, micro_batches=BATCH // size)
        for sequence, size in product((False, True), (2, 4, 8))
    ]
    pipeline = [
        Strategy(pipeline=2, interleave=interleave, micro_batch=size, micro_batches=BATCH // size)
        for interleave, size in product((1, 2), (1, 2, 4))
    ]
    again = [
        Strategy(data=2, zero=2, micro_batch=4, recompute=recompute)
        for recompute in (Recompute.FULL, Recompute.SELECTIVE)
    ]
    return [*data, *tensor, *pipeline, *again]


def run(arguments: list[str]) -> list[Row]:
    """Print predicted and measured seconds of each plan; return what they come to."""
    parser = argparse.ArgumentParser(prog="predicted", description=__doc__)
    parser.add_argument("--plans", type=int, default=20, help="so many, drawn at random")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a plan in a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    chosen = random.Random(options.seed).sample(strategies(), min(options.plans, len(strategies())))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # type: ignore[no-untyped-call]
            _rank, args=(folder, chosen, options.steps, options.rounds, options.seed), nprocs=RANKS
        )
        measured, times = torch.load(Path(folder) / "found", weights_only=False)
    return compare(measured, chosen, times)


def compare(measured: Measurements, chosen: list[Strategy], times: dict[str, float]) -> list[Row]:
    """Print the table; return the median error, and how far the first plan is from the fastest."""
    plans = [predict(measured, one) for one in chosen]
    print(
        f"{'plan':44}{'predicted':>11}{'measured':>11}{'error':>8}   of which exchange, bubble, update"
    )
    errors = []
    for plan in sorted(plans, key=lambda one: one.time.total_s):
        seconds = times[str(plan.strategy)]
        error = plan.time.total_s / seconds - 1.0
        errors.append(abs(error))
        time_ = plan.time
        print(
            f"{plan.strategy!s:44}{plan.time.total_s:9.3f} s{seconds:9.3f} s{error:+8.0%}   "
            f"{time_.exchange_s:.3f} {time_.bubble_s:.3f} {time_.update_s:.3f}"
        )
    first = min(plans, key=lambda one: one.time.total_s)
    best = min(times.values())
    behind = times[str(first.strategy)] / best - 1.0
    print(
        "goals: a median error of 15 %, and a first plan at most 10 % behind the fastest measured"
    )
    return [
        Row(f"predicted step, median error of {len(errors)} plans", statistics.median(errors), "1"),
        Row("predicted step, the first plan over the fastest", behind, "1"),
    ]


def predict(measured: Measurements, strategy: Strategy) -> Plan:
    """Return the plan of a strategy by what was measured."""
    return plan_strategy(
        config(), strategy, cluster=measured.cluster, seq_len=SEQ_LEN, dtype="fp32",
        profile=measured.profile,
    )  # fmt: skip


def _rank(
    rank: int, folder: str, chosen: list[Strategy], steps: int, rounds: int, seed: int
) -> None:
    torch.set_num_threads(1)
    if len(os.sched_getaffinity(0)) >= RANKS:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    measured = _measure()
    times: dict[str, list[float]] = {}
    for turn in range(rounds):
        for strategy in random.Random(seed + turn).sample(chosen, len(chosen)):
            times.setdefault(str(strategy), []).extend(_train(strategy, steps))
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        torch.save((measured, medians), os.path.join(folder, "found"))
    dist.destroy_process_group()


def _measure() -> Measurements:
    """Measure passes and links, on all ranks at once as in training; the slowest rank counts."""
    torch.manual_seed(0)
    model = GPT(config())
    dist.barrier()
    own = profile_model(
        model,
        lambda count: _batch(count),
        lambda outputs, _: outputs[1],
        layers=list(model.layers),
        optimizer=torch.optim.AdamW(model.parameters()),
        sizes=(1, 4),
        rounds=7,
    )
    profiles: list[Any] = [None] * RANKS
    dist.all_gather_object(profiles, own)
    slowest = max(profiles, key=lambda one: one.layer_backward.seconds(4))
    gather = _link(_all_gather)
    reduce, whole = _link(_reduce_scatter), _link(_all_reduce)
    scatter_cost = _seconds(reduce) / _seconds(gather)
    # Its link is measured as if half of the bytes were sent, as in a gather; two of them make one.
    all_cost = _seconds(whole) / (2 * _seconds(gather))
    cluster = ClusterShape(
        1, RANKS, 1e12, 1e11, inside=gather, overlap=0.0, reduce_scatter_cost=scatter_cost,
        all_reduce_cost=all_cost, reserved_bytes=0.0,
    )  # fmt: skip
    found: list[Any] = [Measurements(slowest, cluster)]
    dist.broadcast_object_list(found)
    measured: Measurements = found[0]
    if dist.get_rank() == 0:
        print(measured)
    return measured


def _link(collective: Callable[[int], None]) -> Link:
    """Return rate and latency by the seconds of a small and a large collective of two ranks."""
    took = {}
    for size in SIZES:
        seconds = []
        for _ in range(12):
            dist.barrier()
            began = time.perf_counter()
            collective(size)
            seconds.append(time.perf_counter() - began)
        took[size] = statistics.median(seconds[2:])
    small, large = SIZES
    # A rank sends half of what is gathered: (n - 1) / n.
    rate = (large - small) / 2 / max(1e-9, took[large] - took[small])
    return Link(rate, max(0.0, took[small] - small / 2 / rate))


def _seconds(link: Link) -> float:
    """Return the seconds of a collective of a layer's size."""
    return SIZES[1] / 4 / link.bytes_per_s + link.latency_s


def _all_reduce(nbytes: int) -> None:
    dist.all_reduce(torch.ones(nbytes // 4))


def _all_gather(nbytes: int) -> None:
    whole = torch.empty(nbytes // 4)
    dist.all_gather_into_tensor(whole, whole[: nbytes // 8].clone())


def _reduce_scatter(nbytes: int) -> None:
    whole = torch.ones(nbytes // 4)
    dist.reduce_scatter_tensor(torch.empty(nbytes // 8), whole)


def _batch(count: int) -> tuple[dict[str, torch.Tensor], None]:
    tokens = torch.randint(0, 512, (count, SEQ_LEN))
    return {"tokens": tokens, "targets": tokens}, None


def _train(strategy: Strategy, steps: int) -> list[float]:
    """Return the seconds of ``steps`` steps, of the slowest rank in each."""
    torch.manual_seed(0)
    mesh = device_mesh(strategy, "cpu")
    model = GPT(config())
    parts = (
        split(
            model,
            cut_evenly(config().layers, 2 * strategy.interleave),
            pipeline=2,
            rank=dist.get_rank(),
        )
        if strategy.pipeline > 1
        else [model]
    )
    parts = [parallelize(part, strategy, mesh) for part in parts]
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    pipeline = Pipeline(parts, strategy, mesh) if strategy.pipeline > 1 else None
    tokens = torch.randint(0, 512, (BATCH // strategy.data, SEQ_LEN))
    seconds = []
    for _ in range(steps + 2):
        dist.barrier()
        began = time.perf_counter()
        if pipeline is not None:
            pipeline.step(tokens, tokens)
        else:
            pieces = tokens.split(strategy.micro_batch)
            for number, piece in enumerate(pieces):
                with micro_batch(parts, last=number + 1 == len(pieces)):
                    (parts[0](piece, piece)[1] / len(pieces)).backward()
        optimizer.step()
        optimizer.zero_grad()
        took = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(float(took))
    return seconds[2:]
