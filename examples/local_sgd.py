"""Trains a small network with a strategy of synchronisation, changed while training goes on.

    python examples/local_sgd.py                              # all-reduce; local SGD once the loss is low
    python examples/local_sgd.py --sync adacomm --replicas 4  # AdaComm from the start
    python examples/local_sgd.py --sync overlap_local_sgd

The loop is the same for all of them: the strategy decides what ctx.backward and ctx.step exchange, and when.
Whatever it is, each sample of an epoch is used once, as the ledger proves at the end.
"""

from __future__ import annotations

import argparse
from typing import Any

import stoker
from stoker_train.elastic.policies import Policy, SyncSwitchOnLoss
from stoker_train.elastic.sync import (
    AdaComm,
    AllReduce,
    Hierarchical,
    LocalSGD,
    OverlapLocalSGD,
    PostLocalSGD,
    Strategy,
)

STRATEGIES: dict[str, Strategy] = {
    one.name: one
    for one in (
        AllReduce(),
        LocalSGD(every=8),
        PostLocalSGD(every=8, after=64),
        AdaComm(tau0=16, every_s=2.0),
        OverlapLocalSGD(tau=4, alpha=0.6),
        Hierarchical(every=8),
    )
}


def loop(ctx: Any, config: dict[str, Any]) -> list[str]:
    """Learn whether points lie in a circle, with a strategy of which nothing is to be seen here."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    points = 1.5 * torch.randn(config["samples"], 2, generator=generator)
    inside = (points.norm(dim=1) < 1.5).long()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )
    model.to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ctx.state(model=model, optimizer=optimizer)
    loader = ctx.loader(TensorDataset(points, inside))
    told = []
    for epoch in ctx.epochs(config["epochs"]):
        total, samples = 0.0, 0
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            ctx.backward(loss)
            ctx.step(loss=loss)
            total, samples = total + float(loss.detach()) * len(rows), samples + len(rows)
        loss_of_epoch = ctx.mean(total / max(1, samples), samples)
        told.append(f"epoch {epoch}: loss {loss_of_epoch:.4f}, {ctx.metrics.sync}")
    return told


def main() -> None:
    """Train, and say what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync", choices=STRATEGIES, default="all_reduce")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=8192)
    arguments = parser.parse_args()
    policies: list[Policy] = []
    if arguments.sync == "all_reduce":
        policies = [SyncSwitchOnLoss(0.45, LocalSGD(every=8))]
    stoker.init(num_cpus=arguments.replicas)
    trainer = stoker.train.ElasticTrainer(
        loop,
        config={"samples": arguments.samples, "epochs": arguments.epochs},
        scaling=stoker.train.Scaling(
            min_replicas=arguments.replicas,
            max_replicas=arguments.replicas,
            resources={"CPU": 1},
            base_batch=64,
            adapt="replicas",
        ),
        sync=STRATEGIES[arguments.sync],
        policies=policies,
    )
    result = trainer.fit(timeout_s=600)
    if result.error:
        raise SystemExit(result.error)
    print("\n".join(result.value))
    ledger = "exact" if result.ledger_ok else f"wrong: {result.ledger_problems}"
    print(f"{result.steps} steps, loss {result.metrics['loss']:.4f}, ledger {ledger}")


if __name__ == "__main__":
    main()
