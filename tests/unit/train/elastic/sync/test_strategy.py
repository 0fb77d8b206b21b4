"""Strategies as orders carry them: made from plain values, and switched while training goes on."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker_train.elastic import sync
from stoker_train.elastic.sync import make_strategy

if TYPE_CHECKING:
    from tests.unit.train.elastic.rank_processes import RankProcesses

ALL = [
    sync.AllReduce(compression={"name": "topk", "ratio": 0.1}, bucket_nbytes=1000),
    sync.LocalSGD(4, momentum="average", compression="fp16"),
    sync.PostLocalSGD(4, after=10, block_momentum=0.3),
    sync.AdaComm(8, 2.5, shrink=0.7),
    sync.OverlapLocalSGD(3, 0.4, anchor_momentum=0.7),
    sync.Hierarchical(5),
]


@pytest.mark.parametrize("strategy", ALL, ids=lambda one: one.name)
def test_a_strategy_is_its_plain_values(strategy: sync.Strategy) -> None:
    again = make_strategy(strategy)
    assert again is not strategy
    assert type(again) is type(strategy)
    assert again.spec() == strategy.spec()
    assert pickle.loads(pickle.dumps(strategy)).spec() == strategy.spec()
    assert strategy.name in strategy.spec().values()
    assert type(strategy).__name__ in repr(strategy)
    assert strategy.source
    fresh = make_strategy(strategy)
    fresh.load_state_dict(strategy.state_dict())
    assert fresh.state_dict() == strategy.state_dict()


def test_a_strategy_is_made_by_name() -> None:
    assert make_strategy(None).name == make_strategy("all_reduce").name == "all_reduce"
    with pytest.raises(ValueError, match="sync must be one of all_reduce, local_sgd"):
        make_strategy("allreduce")
    with pytest.raises(ValueError, match="'local_sgd' has other options"):
        make_strategy({"name": "local_sgd", "interval": 3})


def test_strategies_are_made_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from stoker_train.elastic import sync, optimization, policies\n"
        "sync.make_strategy({'name': 'adacomm', 'tau0': 3, 'every_s': 1.0}).observe(1.0, 0.0)\n"
        "policies.SyncSwitchOnLoss(1.0, 'all_reduce')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_strategies_are_switched_while_training_goes_on(ranks: RankProcesses, seed: int) -> None:
    specs = [one.spec() for one in ALL if one.compression != "fp16"]
    for spec in specs:
        spec["compression"] = None if spec.get("compression") else spec.get("compression")
        if spec["name"] == "overlap_local_sgd":
            del spec["compression"]
    ends = ranks.run(_switched, 4, [*specs, *reversed(specs)], seed % 1000)
    for states in ends:
        for mine, first in zip(states, ends[0], strict=True):
            assert torch.equal(mine, first), "replicas are equal at every switch"


def _switched(rank: int, world: int, specs: list[Any], seed: int) -> list[torch.Tensor]:
    from stoker_train.elastic.sync import make_strategy
    from stoker_train.elastic.sync.exchange import GradientExchange
    from tests.unit.train.elastic.sync import training

    model = training.Net(seed)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    exchange = GradientExchange(params, bucket_nbytes=300, nodes=["a", "a", "b", "b"])
    step, states = 0, []
    for spec in specs:
        strategy = make_strategy(spec)
        strategy.reset(exchange)
        for _ in range(5):
            exchange.begin(0.25, strategy.exchanges_gradients(step))
            training.backward(model, exchange, step, 6 * rank, 6, seed)
            strategy.before_optimizer(exchange, params)
            optimizer.step()
            strategy.after_optimizer(exchange, params, optimizer, step)
            optimizer.zero_grad()
            step += 1
        strategy.settle(exchange, params, optimizer)
        momenta = [
            optimizer.state[param]["momentum_buffer"] for param in params if optimizer.state[param]
        ]
        states += [training.flat(params), training.flat(momenta)]
    exchange.close()
    return states
