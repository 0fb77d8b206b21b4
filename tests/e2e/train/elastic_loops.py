"""Loops for the tests of elastic training: small, in float64, and each step leaves a line in a file."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path


class Line(NamedTuple):
    """A step of one process, as its loop saw it."""

    at_s: float
    step: int
    rank: int
    world: int
    generation: int
    pid: int


def linear(ctx: Any, config: dict[str, Any]) -> float:
    """Fit a linear function; a sample takes ``sample_s``. A file ``.broken`` keeps it from starting."""
    import torch

    if os.path.exists(f"{config['folder']}.broken"):
        raise ImportError("this node lacks a module")

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1), momentum=0.5)
    inputs = torch.arange(400, dtype=torch.float64).reshape(100, 4) / 400
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    ctx.state(model=model, optimizer=optimizer)
    loader = ctx.loader(data)
    mean, loss = 0.0, torch.zeros(())
    with open(f"{config['folder']}/{os.getpid()}", "a", buffering=1) as file:
        for _ in ctx.epochs(config["epochs"]):
            for features, targets in loader:
                time.sleep(config.get("sample_s", 0.0) * len(features))
                loss = ((model(features) - targets) ** 2).mean()
                ctx.backward(loss)
                ctx.step(loss=loss)
                line = time.time(), ctx.step_number, ctx.rank, ctx.world_size, ctx.generation
                file.write(" ".join(map(str, line)) + "\n")
                misbehave(ctx, config)
            mean = ctx.mean(float(loss))
        ctx.report(weight=float(model.weight.sum()))
    return mean


def misbehave(ctx: Any, config: dict[str, Any]) -> None:
    """Raise, if that is asked for, at a step of a rank."""
    if config.get("raises") == (ctx.step_number, ctx.rank):
        raise ValueError("the loop of the test has had enough")


def returns_early(ctx: Any, config: dict[str, Any]) -> None:
    """Return from the loop of rank 1 after two steps."""
    import torch

    model = torch.nn.Linear(1, 1)
    ctx.state(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    loader = ctx.loader(torch.utils.data.TensorDataset(torch.ones(64, 1)))
    for _ in ctx.epochs(1):
        for (features,) in loader:
            ctx.backward(model(features).mean())
            ctx.step()
            if ctx.rank == 1 and ctx.step_number == 2:
                return


def mistaken(ctx: Any, config: dict[str, Any]) -> None:
    """Make one ``mistake``: a state or data that cannot be, or an exchange ``early``, or past ctx.

    In an exchange past ctx rank 1 does not come: its process is in the file ``waits``.
    """
    import torch
    import torch.distributed as dist

    mistake = config["mistake"]
    if mistake == "early":
        dist.all_reduce(torch.ones(1))
    model = torch.nn.Linear(1, 1).double()
    more = {"log": (one for one in "ab")} if mistake == "state" else {}
    ctx.state(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6), **more)
    loader = ctx.loader(iter(()) if mistake == "data" else Shards())
    for _ in ctx.epochs(1000):
        for numbers in loader:
            if ctx.generation > 0 and ctx.world_size == 2:
                if ctx.rank == 1:
                    with open(f"{config['folder']}/waits", "w") as file:
                        file.write(f"{os.getpid()}\n")
                    time.sleep(600)
                dist.all_reduce(torch.ones(1))
            ctx.backward(model(numbers).mean())
            ctx.step()


def lines(folder: Path) -> list[Line]:
    """Return the steps of all processes so far, in the order of their time."""
    found = []
    for path in folder.iterdir():
        for text in path.read_text().splitlines():
            parts = text.split(" ")
            if len(parts) == 5:
                at_s, (step, rank, world, generation) = float(parts[0]), map(int, parts[1:])
                found.append(Line(at_s, step, rank, world, generation, int(path.name)))
    return sorted(found)


def pid_of(folder: Path, rank: int) -> int:
    """Return the process of a rank of the newest generation."""
    newest = max(lines(folder), key=lambda one: (one.generation, one.at_s)).generation
    return max(
        (one for one in lines(folder) if one.generation == newest and one.rank == rank),
        key=lambda one: one.at_s,
    ).pid


class Shards:
    """Numbers 0 to 95 in shards of unequal size, read by shard and offset."""

    sizes = (40, 7, 33, 16)

    def shards(self) -> tuple[int, ...]:
        """Return the number of samples of each shard."""
        return self.sizes

    def read(self, shard: int, offset: int, count: int) -> Any:
        """Yield numbers of a shard."""
        import torch

        first = sum(self.sizes[:shard]) + offset
        for number in range(first, first + count):
            yield torch.tensor([float(number)], dtype=torch.float64)


def stream() -> Any:
    """Return the same numbers as an iterable that only begins anew, without shards."""
    import torch

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return sum(Shards.sizes)

        def __iter__(self) -> Any:
            return iter(torch.arange(len(self), dtype=torch.float64).unsqueeze(1))

    return Stream()


def noted(ctx: Any, config: dict[str, Any]) -> None:
    """Train on :class:`Shards`, and note for each step what this rank saw of it: a line of JSON.

    ``folder.hold`` keeps replicas from starting, ``most`` is how many samples of a pass fit in memory
    from step 5 on, of rank ``scarce`` or of all, ``overflows`` is a step whose loss is no number. A pass
    takes ``pass_s``, by default 2 ms for each of its samples. ``stream``: the data have no shards.
    """
    import torch

    while os.path.exists(f"{config['folder']}.hold"):
        time.sleep(0.05)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1).double()
    ctx.state(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = ctx.loader(stream(), shuffle=False) if config.get("stream") else ctx.loader(Shards())
    with open(f"{config['folder']}/{os.getpid()}", "a", buffering=1) as file:
        for epoch in ctx.epochs(1000):
            seen: list[int] = []
            passes: list[int] = []
            for numbers in loader:
                fits = len(numbers) <= config.get("most", 1000)
                if ctx.step_number >= 5 and not fits and config.get("scarce", ctx.rank) == ctx.rank:
                    raise MemoryError(f"{len(numbers)} samples do not fit")
                time.sleep(config.get("pass_s", 0.002 * len(numbers)))
                noise = torch.randn(len(numbers), 1, dtype=torch.float64)
                nan = ctx.step_number == config.get("overflows") and ctx.rank == 0
                loss = ((model(numbers) - noise) ** 2).mean() * (float("nan") if nan else 1.0)
                ctx.backward(loss)
                passes.append(len(numbers))
                seen += [int(one) for one in numbers]
                line: dict[str, Any] = {
                    "epoch": epoch,
                    "step": ctx.step_number,
                    "rank": ctx.rank,
                    "world": ctx.world_size,
                    "generation": ctx.generation,
                    "batch": ctx.batch,
                    "sync": ctx.metrics.sync,
                    "passes": passes,
                    "seen": seen,
                    "draw": float(noise[0, 0]),
                    "pid": os.getpid(),
                }
                try:
                    ctx.step(loss=loss)
                finally:  # a rank that leaves after this step has made it, too
                    if ctx.step_number > line["step"]:
                        file.write(json.dumps({**line, "lr": ctx.metrics.lr}) + "\n")
                if ctx.step_number > line["step"] or ctx.generation != line["generation"]:
                    seen, passes = [], []


def notes(folder: Path) -> list[dict[str, Any]]:
    """Return what :func:`noted` has noted, of all ranks, by step, generation and rank."""
    found = [
        json.loads(line) for path in folder.iterdir() for line in path.read_text().split("\n")[:-1]
    ]
    return sorted(found, key=lambda one: (one["step"], one["generation"], one["rank"]))
