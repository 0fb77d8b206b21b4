"""Local SGD and its kin against all-reduce, and against their papers' formulas, step by step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker_train.elastic.sync import AdaComm, LocalSGD, PostLocalSGD
from tests.unit.train.elastic.sync import training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.train.elastic.rank_processes import RankProcesses

SIZES = [3, 9, 4, 8]


def run(ranks: RankProcesses, spec: Any, steps: int, seed: int, **options: Any) -> list[Any]:
    sizes = options.pop("sizes", SIZES)
    return ranks.run(_train, len(sizes), spec, steps, sizes, seed % 1000, options)


def _train(
    rank: int, world: int, spec: Any, steps: int, sizes: list[int], seed: int, options: Any
) -> dict[str, Any]:
    from tests.unit.train.elastic.sync import training

    return training.train(rank, world, spec, steps, sizes, seed, **options)


def test_a_mean_after_every_step_is_all_reduce_with_local_momentum(
    ranks: RankProcesses, seed: int
) -> None:
    local = run(ranks, LocalSGD(1).spec(), 6, seed)
    dense = run(ranks, "all_reduce", 6, seed)
    for one in local:
        for mine, his in zip(one["history"], dense[0]["history"], strict=True):
            torch.testing.assert_close(mine, his, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("momentum", ["local", "average", "clear"])
def test_ranks_are_equal_after_each_mean_only(
    ranks: RankProcesses, seed: int, momentum: Any
) -> None:
    results = run(ranks, LocalSGD(3, momentum=momentum).spec(), 8, seed)
    for one in results:
        assert one["touched"] == [False, False, True, False, False, True, False, False]
        assert torch.equal(one["settled"], results[0]["settled"])
    for step in range(8):
        same = all(torch.equal(r["history"][step], results[0]["history"][step]) for r in results)
        assert same == (step % 3 == 2)
    if momentum != "average":
        assert {one["collectives"] for one in results} == {2}, "T / H"


def test_a_mean_is_weighted_by_samples(ranks: RankProcesses, seed: int) -> None:
    """Against all ranks' local steps done here, one after the other."""
    results = run(ranks, LocalSGD(2).spec(), 2, seed)
    models = []
    for rank, size in enumerate(SIZES):
        model = training.Net(seed % 1000)
        optimizer = training.Momentum(model)
        own = slice(sum(SIZES[:rank]), sum(SIZES[:rank]) + size)
        for step in range(2):
            rows, numbers, targets = (one[own] for one in training.data(step, seed % 1000))
            (model(rows, numbers) - targets).square().mean().backward()
            optimizer.step()
        models.append(training.flat(list(model.parameters())))
    expected = sum(
        (model * (size / training.BATCH) for model, size in zip(models, SIZES, strict=True)),
        torch.zeros(1, dtype=torch.float64),
    )
    torch.testing.assert_close(results[0]["history"][1], expected, rtol=1e-11, atol=1e-12)


def test_post_local_sgd_is_all_reduce_until_then(ranks: RankProcesses, seed: int) -> None:
    results = run(ranks, PostLocalSGD(3, after=4).spec(), 8, seed)
    dense = run(ranks, "all_reduce", 4, seed)
    assert results[0]["touched"] == [True] * 4 + [False, False, True, False]
    for one in results:
        assert torch.equal(one["history"][3], results[0]["history"][3])
        torch.testing.assert_close(one["history"][3], dense[0]["history"][3], rtol=1e-12, atol=0)
    assert not torch.equal(results[0]["history"][4], results[1]["history"][4])


def test_block_momentum_makes_a_round_one_step(ranks: RankProcesses, seed: int) -> None:
    """``u = beta u + (mean - x)``, ``x += u``: with the first round's change the second goes further."""
    beta = 0.5
    plain = run(ranks, LocalSGD(2, momentum="clear").spec(), 2, seed)
    block = run(ranks, LocalSGD(2, momentum="clear", block_momentum=beta).spec(), 4, seed)
    start = training.flat(list(training.Net(seed % 1000).parameters()))
    first = block[0]["history"][1]
    torch.testing.assert_close(first, plain[0]["history"][1], rtol=1e-11, atol=1e-12)
    again = ranks.run(_round_from, 4, first, 2, SIZES, seed % 1000)[0]
    expected = first + beta * (first - start) + (again - first)
    torch.testing.assert_close(block[0]["history"][3], expected, rtol=1e-10, atol=1e-12)


def _round_from(
    rank: int, world: int, start: torch.Tensor, step: int, sizes: list[int], seed: int
) -> torch.Tensor:
    """Return the mean after a round of two steps from ``start``, without any momentum of rounds."""
    from stoker_train.elastic.sync import LocalSGD
    from stoker_train.elastic.sync.exchange import GradientExchange
    from tests.unit.train.elastic.sync import training

    model = training.Net(seed)
    params = list(model.parameters())
    torch.nn.utils.vector_to_parameters(start, params)
    exchange = GradientExchange(params)
    strategy = LocalSGD(2, momentum="clear")
    strategy.reset(exchange)
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    for number in (step, step + 1):
        exchange.begin(sizes[rank] / training.BATCH, False)
        training.backward(model, exchange, number, sum(sizes[:rank]), sizes[rank], seed)
        strategy.before_optimizer(exchange, params)
        optimizer.step()
        strategy.after_optimizer(exchange, params, optimizer, number)
        optimizer.zero_grad()
    exchange.close()
    return training.flat(params)


def test_changes_are_compressed(ranks: RankProcesses, seed: int) -> None:
    plain = run(ranks, LocalSGD(2).spec(), 4, seed)
    same = run(ranks, LocalSGD(2, compression="none").spec(), 4, seed)
    torch.testing.assert_close(same[0]["settled"], plain[0]["settled"], rtol=1e-11, atol=1e-12)
    sparse = run(ranks, LocalSGD(2, compression={"name": "topk", "ratio": 0.2}).spec(), 4, seed)
    assert all(torch.equal(one["history"][3], sparse[0]["history"][3]) for one in sparse)
    assert not torch.equal(sparse[0]["history"][3], plain[0]["history"][3])


def test_a_rank_without_samples_takes_part(ranks: RankProcesses, seed: int) -> None:
    results = run(ranks, LocalSGD(2, momentum="average").spec(), 4, seed, sizes=[0, 24])
    alone = run(ranks, "all_reduce", 4, seed, sizes=[24])
    for one in results:
        torch.testing.assert_close(one["settled"], alone[0]["settled"], rtol=1e-11, atol=1e-12)


def test_a_strategy_goes_on_from_its_state_in_the_middle_of_a_round(
    ranks: RankProcesses, seed: int
) -> None:
    for spec in (
        LocalSGD(4, block_momentum=0.3, compression="topk").spec(),
        {"name": "overlap_local_sgd", "tau": 4, "alpha": 0.5, "anchor_momentum": 0.7},
        {"name": "all_reduce", "compression": {"name": "topk", "ratio": 0.1}},
    ):
        for whole, cut in ranks.run(_cut, 2, spec, seed % 1000):
            torch.testing.assert_close(whole, cut, rtol=1e-13, atol=0)


def _cut(rank: int, world: int, spec: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Train 12 steps in one go, and with another strategy object and exchange after six."""
    import copy

    from stoker_train.elastic.sync import make_strategy
    from stoker_train.elastic.sync.exchange import GradientExchange
    from tests.unit.train.elastic.sync import training

    ends = []
    for cut in (False, True):
        model = training.Net(seed)
        params = list(model.parameters())
        optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
        exchange, strategy = GradientExchange(params), make_strategy(spec)
        strategy.reset(exchange)
        for step in range(12):
            if step == 6 and cut:
                state = copy.deepcopy((strategy.state_dict(), strategy.rank_state_dict()))
                exchange.close()
                exchange, strategy = GradientExchange(params), make_strategy(spec)
                strategy.reset(exchange)
                strategy.load_state_dict(state[0])
                strategy.load_rank_state_dict(state[1])
            exchange.begin(0.5, strategy.exchanges_gradients(step))
            training.backward(model, exchange, step, 12 * rank, 12, seed)
            strategy.before_optimizer(exchange, params)
            optimizer.step()
            strategy.after_optimizer(exchange, params, optimizer, step)
            optimizer.zero_grad()
        strategy.settle(exchange, params, optimizer)
        exchange.close()
        ends.append(training.flat(params))
    return ends[0], ends[1]


def taus(strategy: AdaComm, losses: Sequence[float], every_s: float = 1.0) -> list[int]:
    found = []
    for number, loss in enumerate(losses):
        strategy.observe(loss, number * every_s)
        found.append(strategy.tau)
    return found


def test_adacomm_shortens_rounds_as_the_loss_falls() -> None:
    losses = [4.0, 4.0 * 0.81, 4.0 * 0.64, 1.0, 0.25]
    expected = [math.ceil(math.sqrt(loss / 4.0) * 20 - 1e-9) for loss in losses]
    assert taus(AdaComm(20, 1.0), losses) == expected == [20, 18, 16, 10, 5]


def test_adacomm_halves_where_the_loss_stalls_and_never_grows() -> None:
    assert taus(AdaComm(20, 1.0), [4.0, 4.0, 5.0, math.nan, 4.0, 3.9, 4, 4]) == [
        20, 10, 5, 5, 3, 2, 1, 1,
    ]  # fmt: skip


def test_adacomm_takes_the_mean_loss_of_an_interval() -> None:
    strategy = AdaComm(16, 10.0)
    for second, loss in ((0, 4.0), (3, 100.0), (6, -97.0), (12, 0.0), (19.9, 1e9)):
        strategy.observe(loss, second)
    assert strategy.tau == 8, "the mean of 100, -97 and 0 is 1, a quarter of the first"
    strategy.observe(0.0, 35.0)
    assert strategy.tau == 4, "one choice for the interval, however late"


def test_adacomm_goes_on_from_its_state() -> None:
    one, other = AdaComm(20, 1.0), AdaComm(20, 1.0)
    taus(one, [4.0, 3.0])
    other.load_state_dict(one.state_dict())
    assert other.tau == one.tau
    for strategy in (one, other):
        strategy.observe(0.5, 2.5)
    assert other.tau == one.tau < 18
    assert other.interval == other.tau


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: LocalSGD(0), "every"),
        (lambda: LocalSGD(2, momentum="other"), "momentum"),  # type: ignore[arg-type]
        (lambda: LocalSGD(2, block_momentum=1.0), "block_momentum"),
        (lambda: PostLocalSGD(2, after=-1), "after"),
        (lambda: AdaComm(0, 1.0), "tau0"),
        (lambda: AdaComm(2, 0.0), "every_s"),
        (lambda: AdaComm(2, 1.0, shrink=2.0), "shrink"),
    ],
)
def test_wrong_options_are_named(make: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} is"):
        make()
