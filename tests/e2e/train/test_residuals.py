"""What a replica leaves behind: the gradient that it had not sent yet, and what its loop returns."""

from __future__ import annotations

import json
import os
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest

from stoker.train import Checkpoint, ElasticTrainer, Failure, Scaling
from tests.e2e.train.elastic_jobs import WAIT_S, has
from tests.services import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.train.elastic_jobs import Trainers

pytest.importorskip("torch")
LARGE = 9 << 20


def compressed(ctx: Any, config: dict[str, Any]) -> bytes:
    """Fit a function with a compressor, note its memory as ranks leave, and return 9 MiB."""
    import torch
    import torch.distributed as dist

    from stoker_train.elastic.replica import steps

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    inputs = torch.randn(96, 4, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(4, 3).double())
    ctx.state(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    hand_on = steps.hand_on

    def owned() -> torch.Tensor:
        compressor = ctx._strategy.strategy.compressor
        kept = [compressor.memory(name)["memory"].sum() for name in compressor.names()]
        return torch.stack(kept).double().sum() if kept else torch.zeros((), dtype=torch.float64)

    def noted(compressor: Any, heirs: Any) -> None:
        before = owned()
        dist.all_reduce(before)
        hand_on(compressor, heirs)
        after, own = owned(), float(owned())
        dist.all_reduce(after)
        file.write(json.dumps([ctx.rank, float(before), float(after), own]) + "\n")

    steps.hand_on = noted
    loader = ctx.loader(data)
    ctx._engine.state.on_reset(
        lambda: file.write(json.dumps([ctx.world_size, float(owned())]) + "\n")
    )
    with open(f"{config['folder']}/{os.getpid()}", "a", buffering=1) as file:
        for _ in ctx.epochs(10_000):
            for features, targets in loader:
                time.sleep(0.02)
                ctx.backward((model(features) - targets).square().mean())
                ctx.step()
    return b"x" * LARGE


def test_what_a_leaver_had_not_sent_is_sent_by_another_and_a_large_value_is_in_a_file(
    trainer: Trainers, tmp_path: Path
) -> None:
    one = ElasticTrainer(
        compressed,
        config={"folder": str(tmp_path / "steps")},
        scaling=Scaling(1, 2, {"CPU": 1}, base_batch=16, interval_s=1000.0),
        sync={"name": "all_reduce", "compression": {"name": "topk", "ratio": 0.3}},
        checkpoint=Checkpoint(str(tmp_path / "checkpoints"), every=50, commit_every=5),
        failure=Failure(hang_s=60.0),
    )
    trainer.made(one)
    one.submit()
    has(one, 2)
    until(lambda: one.progress().get("steps", 0) > 5, WAIT_S, "some steps are made")
    one.resize(1)
    has(one, 1)
    one.stop()
    result = one.result(WAIT_S)
    assert not result.error
    assert result.ledger_ok, result.ledger_problems
    lines = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (tmp_path / "steps").iterdir()
    ]
    drains = sorted(
        (row for rows in lines for row in rows if len(row) == 4), key=lambda row: row[0]
    )
    (first, before, after, own), (second, _, _, left) = drains[-2:]
    assert (first, second) == (0, 1)
    assert before != 0.0, "something was kept back"
    assert after == pytest.approx(before, rel=1e-9)
    assert (own, left) == (pytest.approx(before, rel=1e-9), 0.0)
    # Of one rank, whose mean is its own: half as much is what is owed.
    alone = [row for rows in lines for row in rows if len(row) == 2 and row[0] == 1]
    assert alone[-1][1] == pytest.approx(before / 2, rel=1e-9)
    assert result.value is None
    assert "9.0 MiB" in result.value_problem
    file = tmp_path / "checkpoints" / "returned.pickle"
    assert str(file) in result.value_problem
    assert len(pickle.loads(file.read_bytes())) == LARGE
