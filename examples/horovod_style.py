"""Trains a small network by a loop in the style of Horovod's elastic API, unchanged but for its import.

    python examples/horovod_style.py                     # 2 replicas on this machine
    python examples/horovod_style.py --replicas 4

The loop averages gradients itself, commits after each batch, and is called again whenever replicas come or
go. What its sampler records is in the job's ledger, which `stoker train verify` checks.
"""

from __future__ import annotations

import argparse
from typing import Any

import stoker
import stoker.train
from stoker.train import elastic


def loop(ctx: Any, config: dict[str, Any]) -> float:
    """Learn whether points lie in a ring; return the last loss."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    generator = torch.Generator().manual_seed(0)
    points = torch.randn(config["samples"], 2, generator=generator)
    dataset = TensorDataset(points, ((points.norm(dim=1) - 1.2).abs() < 0.5).long())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    sampler = elastic.ElasticSampler(dataset, seed=1)
    batches = DataLoader(dataset, batch_size=config["batch"], sampler=sampler)

    @elastic.run
    def train(state: Any) -> float:
        for state.epoch in range(state.epoch, config["epochs"]):  # noqa: B020
            for number, (rows, labels) in enumerate(batches):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(rows), labels)
                loss.backward()
                average_gradients(model)
                optimizer.step()
                state.loss = float(loss.detach())
                state.sampler.record_batch(number, len(rows))
                state.commit()
            ctx.report(loss=state.loss, replicas=elastic.size())
            state.sampler.set_epoch(state.epoch + 1)
        return float(state.loss)

    state = elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, loss=float("nan"))
    state.register_reset_callbacks([lambda: scale_rate(optimizer, config["lr"])])
    return train(state)


def average_gradients(model: Any) -> None:
    """Average the gradients over all replicas."""
    import torch.distributed as dist

    if elastic.size() > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= elastic.size()


def scale_rate(optimizer: Any, lr: float) -> None:
    """Scale the learning rate with the number of replicas, as each has a batch of its own."""
    for group in optimizer.param_groups:
        group["lr"] = lr * elastic.size()


def main() -> None:
    """Train, and print what became of it."""
    parser = argparse.ArgumentParser(description="An elastic loop in Horovod's style.")
    parser.add_argument("--replicas", type=int, default=2, help="the most that train together")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=2000)
    args = parser.parse_args()
    stoker.init(num_cpus=args.replicas + 1)
    config = {"epochs": args.epochs, "samples": args.samples, "batch": 32, "lr": 0.05}
    scaling = stoker.train.Scaling(
        min_replicas=1,
        max_replicas=args.replicas,
        resources={"CPU": 1},
        base_batch=config["batch"],
        adapt="replicas",
    )
    trainer = stoker.train.ElasticTrainer(loop, config=config, scaling=scaling)
    result = trainer.fit(timeout_s=600)
    if result.error:
        raise SystemExit(result.error)
    print(f"loss {result.value:.3f} after {args.epochs} epochs, {result.generations} generations")
    print(f"ledger exact: {result.ledger_ok}, in {result.steps} steps")


if __name__ == "__main__":
    main()
