"""Overlap-local-SGD against its formulas, and what travels meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker_train.elastic.sync import OverlapLocalSGD
from tests.unit.train.elastic.sync import training

if TYPE_CHECKING:
    from tests.unit.train.elastic.rank_processes import RankProcesses

ALPHA, BETA, TAU, ROUNDS = 0.6, 0.7, 3, 4
SIZES = [6, 18]


def test_anchor_and_replicas_move_as_in_the_paper(ranks: RankProcesses, seed: int) -> None:
    strategy = OverlapLocalSGD(TAU, ALPHA, anchor_momentum=BETA)
    results = ranks.run(_train, 2, strategy.spec(), seed % 1000)
    models = [training.Net(seed % 1000) for _ in SIZES]
    optimizers = [training.Momentum(model) for model in models]
    anchor = training.flat(list(models[0].parameters()))
    velocity, arriving = torch.zeros_like(anchor), None
    for step in range(TAU * ROUNDS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
            rows, numbers, targets = (one[own] for one in training.data(step, seed % 1000))
            (model(rows, numbers) - targets).square().mean().backward()
            optimizer.step()
        if step % TAU == TAU - 1:
            if arriving is not None:
                velocity = BETA * velocity + (arriving - anchor)
                anchor = anchor + velocity
            arriving = torch.zeros_like(anchor)
            for model, size in zip(models, SIZES, strict=True):
                params = list(model.parameters())
                pulled = training.flat(params)
                pulled = pulled - ALPHA * (pulled - anchor)
                torch.nn.utils.vector_to_parameters(pulled, params)
                arriving = arriving + pulled * (size / training.BATCH)
        for model, result in zip(models, results, strict=True):
            here = training.flat(list(model.parameters()))
            torch.testing.assert_close(result["history"][step], here, rtol=1e-10, atol=1e-12)
    assert results[0]["collectives"] == ROUNDS
    assert torch.equal(results[0]["settled"], results[1]["settled"])


def _train(rank: int, world: int, spec: Any, seed: int) -> dict[str, Any]:
    from tests.unit.train.elastic.sync import test_overlap, training

    steps = test_overlap.TAU * test_overlap.ROUNDS
    return training.train(rank, world, spec, steps, test_overlap.SIZES, seed)


def test_no_step_waits_for_a_mean_but_that_of_the_round_before(ranks: RankProcesses) -> None:
    for launched, waited in ranks.run(_waits, 2):
        assert launched == [0, 1, 1, 2, 2, 3]
        assert waited == [0, 0, 0, 1, 1, 2]


def _waits(rank: int, world: int) -> tuple[list[int], list[int]]:
    from stoker_train.elastic.sync import OverlapLocalSGD
    from stoker_train.elastic.sync.exchange import GradientExchange
    from tests.unit.train.elastic.sync import training

    count = 0

    class Handle:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def wait(self) -> None:
            nonlocal count
            count += 1
            self.inner.wait()

    class Counted(GradientExchange):
        def launch(self, tensor: torch.Tensor) -> Any:
            return Handle(super().launch(tensor))

    model = training.Net(0)
    params = list(model.parameters())
    exchange, strategy = Counted(params), OverlapLocalSGD(2, 0.5)
    strategy.reset(exchange)
    optimizer = torch.optim.SGD(params, lr=0.05)
    launched, waited = [], []
    for step in range(6):
        exchange.begin(0.5, False)
        training.backward(model, exchange, step, 12 * rank, 12, 0)
        strategy.before_optimizer(exchange, params)
        optimizer.step()
        strategy.after_optimizer(exchange, params, optimizer, step)
        optimizer.zero_grad()
        launched.append(exchange.collectives)
        waited.append(count)
    exchange.close()
    return launched, waited


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tau": 0}, "tau"),
        ({"tau": 2, "alpha": 1.5}, "alpha"),
        ({"tau": 2, "anchor_momentum": 1.0}, "anchor_momentum"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is"):
        OverlapLocalSGD(**options)
