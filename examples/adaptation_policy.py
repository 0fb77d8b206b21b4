"""An adaptation policy: tried on a computed job, then in a real one.

    python examples/adaptation_policy.py --simulate   # no cluster, no torch: what would it ask for, and when
    python examples/adaptation_policy.py              # a cluster on this machine, 1 to 2 replicas

The policy raises the batch when the loss stalls, and lowers the learning rate when that did not help. Beside
it run two that are shipped: the batch follows the noise of the gradient, and a budget ends the job in time.
"""

from __future__ import annotations

import argparse
from typing import Any

import stoker
from stoker_goodput.efficiency import GradientNoise
from stoker_goodput.throughput import ThroughputParams
from stoker_train.elastic.policies import (
    Actions,
    BatchFromNoise,
    Budget,
    Metrics,
    Policy,
    simulate,
)

BASE_BATCH, MAX_BATCH = 32, 256


class Stalls(Policy):
    """Double the batch where the smoothed loss is no better than ``steps`` steps ago; then halve the rate."""

    def __init__(self, steps: int = 40, most: int = MAX_BATCH) -> None:
        self.steps, self.most = steps, most
        self.loss = self.best = float("inf")
        self.since = 0
        self.factor = 1.0

    def after_step(self, metrics: Metrics, actions: Actions) -> None:
        """Ask for something after too many steps without a loss that is 1 % better."""
        smoothed = self.loss if self.loss < float("inf") else metrics.loss
        self.loss = 0.9 * smoothed + 0.1 * metrics.loss
        self.since += 1
        if self.loss < 0.99 * self.best:
            self.best, self.since = self.loss, 0
        if self.since < self.steps:
            return
        self.since = 0
        if metrics.batch < self.most:
            actions.set_batch_size(min(self.most, 2 * metrics.batch), "the loss stalls")
        else:
            self.factor /= 2
            actions.set_lr(self.factor, "the loss stalls, and the batch is the largest")


def loop(ctx: Any, config: dict[str, Any]) -> list[str]:
    """Learn whether points lie in a circle from labels of which every tenth is wrong."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    points = 1.5 * torch.randn(config["samples"], 2, generator=generator)
    wrong = torch.rand(config["samples"], generator=generator) < 0.1
    labels_of_all = ((points.norm(dim=1) < 1.5) ^ wrong).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2)).to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.state(model=model, optimizer=optimizer)
    loader = ctx.loader(TensorDataset(points, labels_of_all))
    told = []
    for epoch in ctx.epochs(config["epochs"]):
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            ctx.backward(loss)
            ctx.step(loss=loss)
        now = ctx.metrics
        told.append(
            f"epoch {epoch}: loss {now.loss:.3f}, batch {now.batch}, {now.replicas} replicas, "
            f"noise scale {now.gns:.0f}, lr {now.lr:.3g}"
        )
    return told


def try_it() -> None:
    """Run the policy on a job whose loss stalls at a third of its way, and whose noise grows."""
    steps = simulate(
        Stalls(),
        params=ThroughputParams(0.002, 0.0001, 0.004, 0.001, 0.002, 0.001, 1.5),
        noise=lambda progress: GradientNoise(sqr=1.0, var=1.0 + 20.0 * progress),
        loss=lambda progress: max(0.4, 2.0 - 4.8 * progress),
        base_batch=BASE_BATCH,
        work=1000,
    )
    for step in steps:
        for request in step.requests:
            print(f"step {step.metrics.step}: {request.kind} {request.value}, as {request.reason}")
    last = steps[-1].metrics
    print(f"{last.step} steps in {last.elapsed_s:.1f} s; without the policy it takes 1000 steps")


def main() -> None:
    """Simulate, or train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4096)
    arguments = parser.parse_args()
    if arguments.simulate:
        try_it()
        return
    stoker.init(num_cpus=4)
    trainer = stoker.train.ElasticTrainer(
        loop,
        config={"samples": arguments.samples, "epochs": arguments.epochs},
        scaling=stoker.train.Scaling(
            min_replicas=1,
            max_replicas=2,
            resources={"CPU": 1},
            base_batch=BASE_BATCH,
            max_batch=MAX_BATCH,
            lr="adascale",
        ),
        policies=[BatchFromNoise(MAX_BATCH, every=50), Stalls(), Budget(gpu_hours=0.5)],
    )
    result = trainer.fit(timeout_s=600)
    if result.error:
        raise SystemExit(result.error)
    print("\n".join(result.value))
    ledger = "exact" if result.ledger_ok else f"wrong: {result.ledger_problems}"
    print(f"{result.steps} steps, {len(result.resizes)} resizes, ledger {ledger}")


if __name__ == "__main__":
    main()
