"""Trains the GPT of train_gpt.py as an elastic job: replicas come and go, and the curve stays the same.

    python examples/elastic_gpt.py                           # a cluster on this machine, 1 to 2 replicas
    python examples/elastic_gpt.py --max-replicas 4 --gpus   # a GPU for each replica
    python examples/elastic_gpt.py --resize 1                # give one back in the middle of it

The loop is that of train_gpt.py with its process group, slices of a batch and checkpoints left out: the
context has them. Sample n of the data is row n of the batches that train_gpt.py draws, in their order, so
both have the same curve however many replicas there are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from corpus import read_source
from demo import Api
from reporting import Progress, plot, readable, write
from train_gpt import VALIDATION_BATCHES, Config, samples_of

import stoker
import stoker.train

FIT_S = 3600.0
QUICK = {"steps": 100, "layers": 2, "heads": 2, "dim": 64}
"""What differs from train_gpt.py's defaults, for two CPUs and a minute."""


class Sequences:
    """The sequences of all batches of a training, one after the other: (block + 1,) int64 each."""

    def __init__(self, config: Config, text: np.ndarray) -> None:
        self._config, self._text = config, text
        self._drawn: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._config.steps * self._config.batch

    def __getitem__(self, number: int) -> np.ndarray:
        step, row = divmod(number, self._config.batch)
        if self._drawn[0] != step:
            self._drawn = step, self._config.sample(self._text, step)
        return np.asarray(self._drawn[1][row])


def loop(ctx: Any, config: Config) -> dict[str, Any]:
    """Train on this replica; rank 0's return value is the result's."""
    import torch

    text, held_out = read_source()
    model = config.model().to(ctx.device)
    optimizer = model.optimizer(lr=config.lr)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: config.lr_at(n) / config.lr)
    ctx.state(model=model, optimizer=optimizer, scheduler=rate, max_norm=config.clip)
    loader = ctx.loader(Sequences(config, text), shuffle=False)
    for _ in ctx.epochs(1):
        for rows in loader:
            loss = model(rows[:, :-1], rows[:, 1:])[1]
            ctx.backward(loss)
            if ctx.step(loss=loss):
                ctx.report(loss=ctx.metrics.loss, replicas=ctx.world_size)
    total, count = 0.0, 0
    with torch.no_grad():
        for number in range(ctx.rank, VALIDATION_BATCHES, ctx.world_size):
            rows = torch.from_numpy(config.sample(held_out, number)).to(ctx.device)
            total, count = total + float(model(rows[:, :-1], rows[:, 1:])[1]), count + 1
    validation_loss = ctx.mean(total / max(1, count), weight=count)
    return {"validation_loss": validation_loss, "samples": samples_of(model, config.seed)}


def follow(trainer: stoker.train.ElasticTrainer, config: Config, resize: int) -> Any:
    """Show how it goes until it is over; returns the result."""
    progress = Progress(total=config.steps, batch_bytes=config.batch * config.block, every=1)
    seen, seen_s, replicas, asked = 0, time.monotonic(), 0, resize == 0
    while True:
        try:
            result = trainer.result(timeout_s=1.0)
            progress.end()
            return result
        except stoker.exceptions.GetTimeoutError:
            now = trainer.progress()
        if now.get("replicas", 0) != replicas:
            replicas = now["replicas"]
            print(f"\ngeneration {now['generation']}: {replicas} replicas", flush=True)
        values = now.get("metrics", {})
        step = int(values.get("step", 0))
        if step > seen and "loss" in values:
            step_s = (time.monotonic() - seen_s) / (step - seen)
            progress.show({"step": step, "loss": values["loss"], "step_s": step_s})
            seen, seen_s = step, time.monotonic()
        if not asked and step > config.steps // 3:
            asked = True
            trainer.resize(resize)


def arguments() -> argparse.ArgumentParser:
    """The command line; the fields of train_gpt.Config are options too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--max-replicas", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each replica, not a CPU")
    parser.add_argument("--resize", type=int, default=0, help="ask for so many after a third of it")
    parser.add_argument(
        "--out", default="", help="for checkpoints and curve; default: a new folder"
    )
    for field in fields(Config):
        if field.name != "compress":
            kind = type(field.default)
            parser.add_argument(
                f"--{field.name}", type=kind, default=QUICK.get(field.name, field.default)
            )
    return parser


def main() -> int:
    """Train, and print what became of it; returns the exit code."""
    args = arguments().parse_args()
    config = Config(**{f.name: getattr(args, f.name) for f in fields(Config) if f.name in args})
    cluster = stoker.init()
    trainer = stoker.train.ElasticTrainer(
        loop,
        config=config,
        scaling=stoker.train.Scaling(
            min_replicas=args.min_replicas,
            max_replicas=args.max_replicas,
            resources={"GPU": 1} if args.gpus else {"CPU": 1},
            base_batch=config.batch,
            adapt="replicas",
        ),
        checkpoint=args.out or None,
    )
    print(f"job: {trainer.submit()}, on {cluster.address}; checkpoints: {trainer.checkpoint.path}")
    result = follow(trainer, config, args.resize)
    if result.error:
        print(f"elastic_gpt: {result.error}", file=sys.stderr)
        return 1
    for sample in result.value["samples"]:
        print(f"--- sample\n{readable(sample)}")
    path = f"/v1/training-runs/{result.job_id}/default?metrics=loss&points={config.steps}"
    losses = Api(cluster).get(path)["metrics"]["loss"]["mean"]
    metrics = {"losses": losses, "validation_loss": result.value["validation_loss"]}
    out = Path(trainer.checkpoint.path or ".")
    write(out / "metrics.json", json.dumps(metrics).encode())
    for cost in result.resizes:
        print(f"step {cost.step}: {cost.before} -> {cost.after} replicas, {cost.pause_s:.2f} s")
    print(
        f"--- loss {losses[0]:.3f} -> {losses[-1]:.3f}, held out "
        f"{metrics['validation_loss']:.3f} nats per byte after {result.steps} steps, "
        f"{result.generations} generations"
    )
    print(f"curve: {plot(metrics, out / 'loss.png') or 'none'}")
    print("ledger: exact" if result.ledger_ok else f"ledger: {result.ledger_problems}")
    return 0 if result.ledger_ok else 1


if __name__ == "__main__":
    sys.exit(main())
