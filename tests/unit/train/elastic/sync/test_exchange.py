"""The exchange of gradients: one result for any number of ranks, in one order, and nothing leaked."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stoker_train.elastic.sync.exchange import GradientExchange
from tests.unit.train.elastic.sync import training

if TYPE_CHECKING:
    from tests.unit.train.elastic.rank_processes import RankProcesses


def split(generator: random.Random, total: int, world: int) -> list[int]:
    """Random shares, some of which may be 0."""
    cuts = sorted(generator.randint(0, total) for _ in range(world - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_any_number_of_ranks_with_any_shares_trains_as_one_does(
    ranks: RankProcesses, seed: int, optimizer: str
) -> None:
    generator = random.Random(seed)
    alone = ranks.run(_train, 1, [training.BATCH], seed % 1000, optimizer, 1)[0]
    for world in (2, 3, 4):
        sizes = [0] * (world - 1) + [training.BATCH] if world == 3 else None
        sizes = sizes or split(generator, training.BATCH, world)
        passes = generator.randint(1, 3)
        together = ranks.run(_train, world, sizes, seed % 1000, optimizer, passes)
        for one in together:
            assert one["unused"] == alone["unused"] == ["never.weight", "never.bias"]
            for mine, his in zip(one["history"], alone["history"], strict=True):
                torch.testing.assert_close(mine, his, rtol=1e-12, atol=1e-13)
            assert torch.equal(one["settled"], together[0]["settled"])


def _train(
    rank: int, world: int, sizes: list[int], seed: int, optimizer: str, passes: int
) -> dict[str, Any]:
    from tests.unit.train.elastic.sync import training

    return training.train(
        rank, world, "all_reduce", 6, sizes, seed, optimizer=optimizer, passes=passes, lr=0.01
    )


def test_buckets_go_in_one_order_whatever_the_order_of_the_backward_pass(
    ranks: RankProcesses, seed: int
) -> None:
    results = ranks.run(_any_order, 4, seed)
    launched = results[0]["launched"]
    assert len(launched) == results[0]["buckets"] > 8
    for one in results:
        assert one["launched"] == launched
        for mine, first in zip(one["grads"], results[0]["grads"], strict=True):
            assert torch.equal(mine, first)
        for mine, expected in zip(one["grads"], one["expected"], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=0)


def _any_order(rank: int, world: int, seed: int) -> dict[str, Any]:
    """Sum over the ranks of what each gives a random part of the parameters, in a random order."""
    params = [nn.Parameter(torch.ones(7, dtype=torch.float64)) for _ in range(20)]
    exchange = GradientExchange(params, bucket_nbytes=64)
    launched = []
    start_sum = exchange.start_sum

    def noted(tensor: torch.Tensor, group: Any = None) -> Any:
        launched.append(tensor.numel())
        return start_sum(tensor, group)

    exchange.start_sum = noted  # type: ignore[method-assign]
    weights = []
    for other in range(world):
        generator = random.Random(seed + other)
        weights.append([generator.choice([0.0, generator.random()]) for _ in params])
    order = list(range(len(params)))
    random.Random(seed - rank).shuffle(order)
    exchange.begin(1 / world)
    exchange.arm()
    for place in order:  # one backward pass each: the hooks come in this order
        if weights[rank][place]:
            (params[place] * weights[rank][place]).sum().backward()
    exchange.finish()
    sums = [sum(weights[other][place] for other in range(world)) for place in range(len(params))]
    for param, expected in zip(params, sums, strict=True):
        assert (param.grad is None) == (expected == 0)
    exchange.close()
    return {
        "launched": launched,
        "buckets": len(exchange.buckets),
        "grads": [p.grad for p in params if p.grad is not None],
        "expected": [torch.full((7,), one, dtype=torch.float64) for one in sums if one],
    }


def test_buckets_are_launched_while_the_backward_pass_goes_on(ranks: RankProcesses) -> None:
    assert ranks.run(_launched_by_then, 2) == [[1, 2]] * 2


def _launched_by_then(rank: int, world: int) -> list[int]:
    """Count the collectives when the gradients of the second and of the first layer's output are there."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    exchange = GradientExchange([one.weight for one in layers], bucket_nbytes=8 * 8 * 4)
    counts: list[int] = []
    exchange.begin(0.5)
    exchange.arm()
    value = torch.randn(4, 8, requires_grad=True)
    for layer in layers:
        value = layer(value)
        value.register_hook(lambda _: counts.append(exchange.collectives))
    value.sum().backward()
    exchange.finish()
    exchange.close()
    assert exchange.collectives == 3
    return counts[1:]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("none", {}),
        ("fp16", {}),
        ("topk", {"ratio": 0.25}),
        ("powersgd", {"rank": 2}),
        ("onebit", {}),
    ],
)
def test_compressed_sums_are_the_same_bits_on_all_ranks(
    ranks: RankProcesses, seed: int, name: str, options: dict[str, Any]
) -> None:
    sizes = [4, 0, 12, 8]
    spec = {"name": "all_reduce", "compression": {"name": name, **options}}
    results = ranks.run(_compressed, 4, spec, sizes, seed % 1000)
    for one in results:
        assert torch.equal(one["settled"], results[0]["settled"])
        assert one["settled"].isfinite().all()
    if name == "none":
        dense = ranks.run(_compressed, 4, "all_reduce", sizes, seed % 1000)
        torch.testing.assert_close(
            results[0]["settled"], dense[0]["settled"], rtol=1e-12, atol=1e-13
        )


def _compressed(rank: int, world: int, spec: Any, sizes: list[int], seed: int) -> dict[str, Any]:
    from tests.unit.train.elastic.sync import training

    return training.train(rank, world, spec, 5, sizes, seed)


def test_the_square_of_a_local_gradient_is_measured_before_the_sum(
    ranks: RankProcesses, seed: int
) -> None:
    for measured, expected, sums_to in ranks.run(_measured, 3, seed):
        assert measured == pytest.approx(expected, rel=1e-12)
        assert sums_to == pytest.approx(1.0, rel=1e-12)


def _measured(rank: int, world: int, seed: int) -> tuple[float, float, float]:
    generator = torch.Generator().manual_seed(seed + rank)
    params = [nn.Parameter(torch.randn(9, generator=generator).double()) for _ in range(5)]
    divisors = {param: torch.full_like(param, 2.0) for param in params}
    exchange = GradientExchange(params, bucket_nbytes=100)
    exchange.begin(1 / world)
    exchange.measure(
        lambda params: sum(
            ((p.grad / divisors[p]).square().sum() for p in params if p.grad is not None),
            torch.zeros((), dtype=torch.float64),
        )
    )
    exchange.arm()
    sum((param.square().sum() for param in params), torch.zeros(())).backward()
    expected = sum(float(p.detach().square().sum()) for p in params)
    shares = torch.full((1,), 1 / world, dtype=torch.float64)
    exchange.start_sum(shares).wait()
    exchange.finish()
    assert exchange.local_square is not None
    measured = float(exchange.local_square)
    exchange.begin(1 / world)  # not measured again unless it is asked for
    exchange.finish()
    assert exchange.local_square is None
    exchange.close()
    return measured, expected, float(shares)


class Recorded:
    """A handle that notes that it was waited for, and may fail."""

    def __init__(self, waited: list[int], number: int, fails: bool) -> None:
        self.waited, self.number, self.fails = waited, number, fails

    def wait(self) -> None:
        self.waited.append(self.number)
        if self.fails:
            raise RuntimeError(f"collective {self.number} broke")


class Broken(GradientExchange):
    """An exchange of two ranks whose collectives are recorded; some fail when launched, or waited for."""

    def __init__(self, count: int, at_launch: set[int], at_wait: set[int]) -> None:
        params = [nn.Parameter(torch.ones(4)) for _ in range(count)]
        super().__init__(params, bucket_nbytes=16)
        self.route(None, 2)
        self.at_launch, self.at_wait = at_launch, at_wait
        self.launched: list[int] = []
        self.waited: list[int] = []

    def start_sum(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> Any:
        number = len(self.launched)
        if number in self.at_launch:
            raise ConnectionError(f"peer is gone at {number}")
        self.launched.append(number)
        return Recorded(self.waited, number, number in self.at_wait)

    def backward(self) -> None:
        self.begin(0.5)
        self.arm()
        sum((param.sum() for param in self.params), torch.zeros(())).backward()


def test_all_handles_are_waited_for_when_some_fail() -> None:
    exchange = Broken(6, set(), {1, 3})
    exchange.backward()
    with pytest.raises(RuntimeError, match="collective 1 broke"):
        exchange.finish()
    assert exchange.waited == list(range(6))
    exchange.at_wait = set()
    exchange.backward()  # and the next step begins clean
    exchange.finish()
    exchange.close()


def test_a_launch_that_fails_in_the_backward_pass_is_raised_by_finish() -> None:
    exchange = Broken(6, {2}, set())
    exchange.backward()
    with pytest.raises(ConnectionError, match="peer is gone at 2"):
        exchange.finish()
    assert exchange.waited == exchange.launched == [0, 1]
    exchange.close()


def test_a_step_given_up_waits_and_raises_nothing() -> None:
    exchange = Broken(6, set(), {0})
    exchange.backward()
    exchange.cancel()
    assert exchange.waited == exchange.launched
    exchange.close()
    sum((param.sum() for param in exchange.params), torch.zeros(())).backward()
    assert exchange.waited == exchange.launched == list(range(6)), "its hooks are removed"


def test_gradients_are_kept_for_a_step_that_stays_local() -> None:
    param = nn.Parameter(torch.ones(3))
    exchange = GradientExchange([param])
    for share, expected in ((0.25, 4.0), (0.0, 0.0)):
        exchange.begin(share, gradients=False)
        exchange.arm()
        param.grad = torch.ones(3) if share else None
        exchange.keep_local()
        assert param.grad is not None
        assert param.grad.tolist() == [expected] * 3
    exchange.close()


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_is_a_part(share: float) -> None:
    exchange = GradientExchange([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="share is"):
        exchange.begin(share)
    exchange.close()


def test_sparse_gradients_are_summed_as_dense_ones(ranks: RankProcesses) -> None:
    for grad in ranks.run(_sparse, 2):
        assert grad.tolist() == [[1.0, 1.0], [3.0, 3.0], [2.0, 2.0], [0.0, 0.0]]


def _sparse(rank: int, world: int) -> torch.Tensor:
    table = nn.Embedding(4, 2, sparse=True)
    exchange = GradientExchange(table.parameters())
    exchange.begin(0.5)
    exchange.arm()
    table(torch.tensor([[0, 1], [1, 1, 2, 2]][rank])).sum().backward()
    exchange.finish()
    exchange.close()
    assert table.weight.grad is not None
    return table.weight.grad
