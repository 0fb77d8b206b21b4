"""Local SGD and its kin beside all-reduce on a slow network: ``python -m benchmarks.local_sgd``.

Four ranks (gloo, on this machine) train a small network on samples that never come twice; a collective is
over 20 ms (``--delay-ms``) after its launch at the earliest, waited for at once or later. All-reduce runs for
``--steps`` steps. What counts is the time until the loss is as low as that of its end, on held-out samples:
when all-reduce had it first, and when each strategy has it. The loss is that of the mean of the replicas;
measuring it stops the clock. Reported: seconds, by those of all-reduce; medians over seeds.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import Row, append, show
from stoker_train.elastic.sync import (
    AdaComm,
    AllReduce,
    Hierarchical,
    LocalSGD,
    OverlapLocalSGD,
    PostLocalSGD,
    Strategy,
)

RANKS = 4
BATCH = 128
FEATURES, WIDTH, CLASSES = 64, 256, 10
LR, MOMENTUM = 0.03, 0.9
HELD_OUT = 4_096
NOISE = 1.0
"""Of the teacher's answers, beside a spread of about 3."""
EVERY = 8
"""Steps from one measurement of the loss to the next, at least. All-reduce's end is its last five."""
PATIENCE = 3.0
"""A strategy has so many times the seconds of all-reduce."""
GOAL = 0.7


class Outcome(NamedTuple):
    """A run: its steps and collectives, and the seconds and loss at each of its measurements."""

    steps: int
    collectives: int
    curve: list[tuple[float, float]]

    def seconds_to(self, goal: float) -> float:
        """Return when the loss was ``goal`` or less for the first time; inf for never."""
        return next((seconds for seconds, loss in self.curve if loss <= goal), math.inf)


def strategies(seconds: float) -> list[Strategy]:
    """Return what is compared, for a run that all-reduce does in ``seconds``."""
    return [
        LocalSGD(8),
        PostLocalSGD(8, after=40),
        AdaComm(16, every_s=seconds / 10),
        OverlapLocalSGD(2, 0.6),
        Hierarchical(8),
        AllReduce(compression={"name": "topk", "ratio": 0.05}),
    ]


def run(
    rank: int,
    spec: dict[str, Any],
    seed: int,
    delay_s: float,
    steps: int,
    goal: float,
    limit_s: float,
) -> Outcome:
    """Train on one rank until the loss is ``goal``, for ``steps`` steps or ``limit_s`` seconds at most."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from stoker_train.elastic.sync import make_strategy
    from stoker_train.elastic.sync.averaging import average_
    from stoker_train.elastic.sync.exchange import GradientExchange, Handle

    class Slow:
        """A collective that is over ``delay_s`` after it was launched at the earliest."""

        def __init__(self, inner: Handle) -> None:
            self.inner, self.until = inner, time.perf_counter() + delay_s

        def wait(self) -> None:
            self.inner.wait()
            time.sleep(max(0.0, self.until - time.perf_counter()))

    class SlowExchange(GradientExchange):
        def start_sum(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> Handle:
            inner = super().start_sum(tensor, group)
            within = group is not None and group is not self.group  # a node's own network is fast
            return inner if within else Slow(inner)

    generator = torch.Generator().manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, CLASSES),
    )
    for net, gain in ((teacher, 3.0), (model, 1.0)):
        for param in net.parameters():
            fan = param.shape[-1]
            param.data = torch.randn(param.shape, generator=generator) * gain / fan**0.5
            if param.ndim == 1:
                param.data.zero_()

    @torch.no_grad()
    def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw samples, the same on all ranks."""
        rows = torch.randn(count, FEATURES, generator=generator)
        noise = torch.randn(count, CLASSES, generator=generator) * NOISE
        return rows, (teacher(rows) + noise).argmax(1)

    held_rows, held_targets = samples(HELD_OUT)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)
    exchange = SlowExchange(params, nodes=["a", "a", "b", "b"])
    strategy = make_strategy(spec)
    strategy.reset(exchange)
    size, measured, spent, step = BATCH // RANKS, 0, 0.0, 0
    curve: list[tuple[float, float]] = []
    losses: list[float] = []
    dist.barrier()
    for step in range(steps):
        rows, targets = (one[rank * size :][:size] for one in samples(BATCH))
        began = time.perf_counter()
        exchange.begin(1 / RANKS, strategy.exchanges_gradients(step))
        touches = strategy.communicates(step)
        exchange.arm()
        error = nn.functional.cross_entropy(model(rows), targets)
        (error / RANKS).backward()
        strategy.before_optimizer(exchange, params)
        optimizer.step()
        strategy.after_optimizer(exchange, params, optimizer, step)
        optimizer.zero_grad()
        losses.append(float(error.detach()))
        spent += time.perf_counter() - began
        if not touches:
            continue
        # What follows is bookkeeping of the trainer and of the benchmark: the clock stands still.
        facts = torch.tensor([statistics.fmean(losses) / RANKS, spent / RANKS], dtype=torch.float64)
        losses = []
        dist.all_reduce(facts)
        strategy.observe(float(facts[0]), float(facts[1]))
        if step + 1 - measured >= EVERY or step + 1 == steps:
            measured = step + 1
            kept = [param.detach().clone() for param in params]
            quick = GradientExchange([])
            average_(quick, params, 1 / RANKS)
            with torch.no_grad():
                loss = float(nn.functional.cross_entropy(model(held_rows), held_targets))
            curve.append((float(facts[1]), loss))
            for param, value in zip(params, kept, strict=True):
                param.data.copy_(value)
            if loss <= goal or float(facts[1]) > limit_s:
                break
    found = Outcome(step + 1, exchange.collectives, curve)
    exchange.close()
    return found


def serve(rank: int, store: str, line: Any) -> None:
    """Be a rank: run what comes by ``line``."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    while (arguments := line.recv()) is not None:
        line.send(run(rank, *arguments))
    dist.destroy_process_group()


def main() -> None:
    """Compare, print, and append to results.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results.csv"))
    arguments = parser.parse_args()
    delay_s = arguments.delay_ms / 1e3
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        lines, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, f"{folder}/store", theirs))
            process.start()
            lines.append(ours)
            processes.append(process)

        def outcome(
            strategy: Strategy, seed: int, steps: int, goal: float, limit_s: float
        ) -> Outcome:
            for line in lines:
                line.send((strategy.spec(), seed, delay_s, steps, goal, limit_s))
            found = [line.recv() for line in lines]
            return found[0]

        outcome(AllReduce(), 0, 5, 0.0, 60.0)  # imports, and first passes
        ratios: dict[str, list[float]] = {}
        for seed in range(arguments.seeds):
            dense = outcome(AllReduce(), seed, arguments.steps, 0.0, math.inf)
            goal = statistics.median(loss for _, loss in dense.curve[-5:])
            base_s = dense.seconds_to(goal)
            print(f"seed {seed}: all_reduce has loss {goal:.4f} after {base_s:.2f} s", flush=True)
            for strategy in strategies(base_s):
                name = strategy.name + ("+topk" if strategy.name == "all_reduce" else "")
                found = outcome(strategy, seed, 50 * arguments.steps, goal, PATIENCE * base_s)
                ratio = found.seconds_to(goal) / base_s
                ratios.setdefault(name, []).append(ratio)
                counts = f"{found.steps} steps, {found.collectives} collectives"
                print(f"  {name:18} {ratio:6.2f} x, {counts}", flush=True)
        for line, process in zip(lines, processes, strict=True):
            line.send(None)
            process.join()
    rows = [
        Row(f"{name}_time_to_loss_of_all_reduce", statistics.median(values), "x")
        for name, values in ratios.items()
    ]
    show(rows)
    ada = statistics.median(ratios["adacomm"])
    print(
        f"AdaComm: {ada:.2f} x, wanted {GOAL} x or less: {'reached' if ada <= GOAL else 'missed'}"
    )
    append(arguments.out, "stoker", "local_sgd", rows)


if __name__ == "__main__":
    main()
