"""Loops that the benchmarks of elastic training run on their replicas; each step leaves a line in a file.

A replica imports them by name: nothing here starts a cluster.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 4
COLUMNS = 7


class Line(NamedTuple):
    """A step of one process, as its loop saw it; ``loss`` is the mean over the global batch."""

    at_s: float
    step: int
    rank: int
    world: int
    generation: int
    loss: float
    pid: int


class Ones:
    """Samples of ones: ``features`` numbers each."""

    def __init__(self, features: int, length: int) -> None:
        self._features, self._length = features, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        import torch

        return torch.ones(self._features)


class Waves:
    """Sample n is a point and a smooth function of it, in float64."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, number: int) -> Any:
        import torch

        features = torch.sin(torch.arange(1, 9, dtype=torch.float64) * (number + 1) * 0.37)
        return features, features.prod().reshape(1) + features.sum().reshape(1)


def wide(ctx: Any, config: dict[str, Any]) -> None:
    """Train ``config["parameters"]`` weights in four layers until the job is stopped."""
    import torch

    side = max(1, int((config["parameters"] / LAYERS) ** 0.5))
    layers = [torch.nn.Linear(side, side, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    ctx.state(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    loader = ctx.loader(Ones(side, 100_000), shuffle=False)
    with _file(config) as file:
        for _ in ctx.epochs(1000):
            for rows in loader:
                time.sleep(config["sample_s"] * len(rows))
                loss = model(rows).square().mean()
                ctx.backward(loss)
                if ctx.step(loss=loss):  # not where it has gone back to a commit
                    _write(file, ctx, 0.0)


def curve(ctx: Any, config: dict[str, Any]) -> None:
    """Fit a function in float64, for ``config["epochs"]`` epochs."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    ctx.state(model=model, optimizer=optimizer)
    loader = ctx.loader(Waves())
    with _file(config) as file:
        for _ in ctx.epochs(config["epochs"]):
            for features, targets in loader:
                time.sleep(config["sample_s"] * len(features))
                loss = (model(features) - targets).square().mean()
                ctx.backward(loss)
                if ctx.step(loss=loss):
                    _write(file, ctx, float(ctx.metrics.loss))


def paced(ctx: Any, config: dict[str, Any]) -> None:
    """Fit a line for ``config["steps"]`` steps, each as long as ``config["paces"]`` has it for its placement.

    The passes' time is slept before the backward pass of each, the exchange's in the exchange: so that the
    job measures either where it belongs. What a step does besides is a part of its passes' time; what comes
    between two generations is not.
    """
    import torch

    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    model = torch.nn.Linear(16, 1)
    ctx.state(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    loader = ctx.loader(Repeated(inputs, config["steps"] * config["batch"]), shuffle=False)
    clock = Metronome(ctx, config["paces"])
    with _file(config) as file:
        for _ in ctx.epochs(1):
            for rows in loader:
                loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
                clock.end_pass()
                ctx.backward(loss)
                generation = ctx.generation
                if ctx.step(loss=loss) and ctx.rank == 0 and ctx.generation == generation:
                    _write(file, ctx, 0.0)


class Repeated:
    """``length`` samples: the rows of a tensor, again and again."""

    def __init__(self, rows: Any, length: int) -> None:
        self._rows, self._length = rows, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self._rows[number % len(self._rows)]


class Metronome:
    """The clock of a replica: passes and exchanges end when the pace of its placement says, or later."""

    def __init__(self, ctx: Any, paces: dict[tuple[int, ...], Any]) -> None:
        self._ctx, self._paces = ctx, paces
        self._generation = 0
        self._due_s = 0.0
        self._pace: Any = None
        steps = getattr(ctx, "_steps", None)
        if steps is None:  # a rehearsal takes no time
            return
        strategy = steps.kind.strategy
        finish = strategy.before_optimizer

        def finish_later(exchange: Any, params: Any) -> None:
            finish(exchange, params)
            self._sleep(self._pace.exchange_s)

        strategy.before_optimizer = finish_later

    def end_pass(self) -> None:
        """Sleep to the end of a pass."""
        ctx = self._ctx
        if getattr(ctx, "_steps", None) is None:
            return
        if ctx.generation != self._generation:
            self._generation, self._due_s = ctx.generation, time.perf_counter()
            self._pace = self._paces[tuple(ctx._engine.membership.nodes.values())]
        self._sleep(self._pace.pass_s)

    def _sleep(self, seconds: float) -> None:
        """Sleep for what is left of ``seconds`` since the last sleep ended; who is late does not catch up."""
        left_s = self._due_s + seconds - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        self._due_s = time.perf_counter()


def _file(config: dict[str, Any]) -> Any:
    return open(f"{config['folder']}/{os.getpid()}", "a", buffering=1)


def _write(file: Any, ctx: Any, loss: float) -> None:
    line = time.time(), ctx.step_number, ctx.rank, ctx.world_size, ctx.generation, repr(loss), "."
    file.write(" ".join(map(str, line)) + "\n")


def lines(folder: Path) -> list[Line]:
    """Return the steps of all processes so far, in the order of their time."""
    found = []
    for path in folder.iterdir():
        for text in path.read_text().splitlines():
            parts = text.split(" ")
            if len(parts) == COLUMNS and int(parts[4]):
                step, rank, world, generation = map(int, parts[1:5])
                at_s, loss = float(parts[0]), float(parts[5])
                found.append(Line(at_s, step, rank, world, generation, loss, int(path.name)))
    return sorted(found)
