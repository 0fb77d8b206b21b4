"""Square sums and times of a replica's step, on ranks of real groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.unit.train.elastic.rank_processes import RankProcesses


@pytest.mark.parametrize("kind", ["sgd", "adamw", "ours"])
@pytest.mark.parametrize("clips", [False, True])
def test_a_step_of_several_ranks_measures_both_gradients(
    ranks: RankProcesses, seed: int, kind: str, clips: bool
) -> None:
    """The rows against gradients computed from all samples at once."""
    for row, small, big in ranks.run(_step, 3, kind, clips, [8, 4, 12], [1, 2, 3], seed % 1000):
        assert row.small_square == pytest.approx(small, rel=1e-9)
        assert row.big_square == pytest.approx(big, rel=1e-6 if kind == "ours" else 1e-9)
        assert row.big_size == 24


def test_one_rank_measures_its_first_pass_or_the_step_before(
    ranks: RankProcesses, seed: int
) -> None:
    ((row, small, big),) = ranks.run(_step, 1, "sgd", False, [24], [3], seed % 1000)
    assert (row.small_size, row.big_size) == (8, 24)
    assert row.small_square == pytest.approx(small, rel=1e-9)
    assert row.big_square == pytest.approx(big, rel=1e-9)
    ((first, second, small, big),) = ranks.run(_differenced, 1, seed % 1000)
    assert first.small_size == 0
    assert (second.small_size, second.big_size) == (24, 48)
    assert second.small_square == pytest.approx(small, rel=1e-9)
    assert second.big_square == pytest.approx(big, rel=1e-9)


def test_a_step_that_is_not_measured_keeps_what_the_next_needs(
    ranks: RankProcesses, seed: int
) -> None:
    for rows in ranks.run(_paced, 2, seed % 1000):
        assert [row.small_size > 0 for row in rows] == [False, True, False, False]
        assert [row.noise_s > 0 for row in rows] == [False, True, False, False]
    (rows,) = ranks.run(_paced, 1, seed % 1000)
    assert [row.big_size for row in rows] == [0, 48, 0, 0]
    (every,) = ranks.run(_differenced, 1, seed % 1000)
    assert rows[1].small_square == pytest.approx(every[2], rel=1e-9)
    assert rows[1].big_square == pytest.approx(every[3], rel=1e-9)


def _gradient(seed: int, step: int, first: int, size: int) -> Any:
    """The mean gradient of some samples of a step, by parameter, of the model as it is made."""
    import torch

    from tests.unit.train.elastic.sync import training

    model = training.Net(seed)
    rows, numbers, targets = (one[first : first + size] for one in training.data(step, seed))
    (model(rows, numbers) - targets).square().mean().backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _step(
    rank: int, world: int, kind: str, clips: bool, sizes: list[int], passes: list[int], seed: int
) -> tuple[Any, float, float]:
    """Return the row of a step, and what it should hold. Adam has made a step before, with lr 0."""
    import torch

    from stoker_train.elastic.optimization import StepRow
    from stoker_train.elastic.optimization.measuring import NoiseMeter
    from stoker_train.elastic.sync.exchange import GradientExchange
    from tests.unit.train.elastic.sync import training

    model = training.Net(seed)
    params = list(model.parameters())
    optimizer: Any
    if kind == "ours":
        from stoker_kernels.optim import SGD

        optimizer = SGD(params, lr=0.0)
    elif kind == "sgd":
        optimizer = torch.optim.SGD(params, lr=0.0)
    else:
        optimizer = torch.optim.AdamW(params, lr=0.0)
    exchange, meter = GradientExchange(params), NoiseMeter(optimizer)
    first, size = sum(sizes[:rank]), sizes[rank]
    row = StepRow()
    for step in (0, 1) if kind == "adamw" else (1,):
        divisors = [torch.ones_like(param) for param in params]
        if kind == "adamw" and step == 1:
            for place, g in enumerate(_gradient(seed, 0, 0, 24)):
                divisors[place] = g.abs() + 1e-8
        row = StepRow()
        exchange.begin(size / 24)
        meter.begin(exchange, size, 24, passes[rank])
        rows, numbers, targets = training.data(step, seed)
        pieces = torch.arange(first, first + size).tensor_split(passes[rank])
        for index, piece in enumerate(pieces):
            if index == len(pieces) - 1:
                exchange.arm()
            error = (model(rows[piece], numbers[piece]) - targets[piece]).square().mean()
            (error * len(piece) / 24).backward()
            if index == 0 and len(pieces) > 1:
                meter.first_pass(len(piece))
        exchange.finish()
        norm = torch.nn.utils.clip_grad_norm_(params, 1e-3) if clips and kind != "ours" else None
        if norm is None or kind == "adamw":
            meter.before_optimizer()
        else:
            meter.before_optimizer(norm)
        optimizer.step()
        optimizer.zero_grad()
        meter.end(row)
    exchange.close()
    if clips and kind == "adamw":
        # Clipped before: what it measures is that gradient.
        row.big_square = _square(_gradient(seed, 1, 0, 24), divisors)
        row.small_square = _square(_gradient(seed, 1, first, size), divisors)
    small_size = size if world > 1 else 24 // passes[0]
    small = _square(_gradient(seed, 1, first, small_size), divisors)
    return row, small, _square(_gradient(seed, 1, 0, 24), divisors)


def _square(grads: Any, divisors: Any) -> float:
    return sum(float((g / d).square().sum()) for g, d in zip(grads, divisors, strict=True))


def _differenced(rank: int, world: int, seed: int) -> tuple[Any, Any, float, float]:
    import torch

    from stoker_train.elastic.optimization import StepRow
    from stoker_train.elastic.optimization.measuring import NoiseMeter
    from stoker_train.elastic.sync.exchange import GradientExchange
    from tests.unit.train.elastic.sync import training

    model = training.Net(seed)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.0)
    exchange, meter = GradientExchange(params), NoiseMeter(optimizer)
    rows = []
    for step in (0, 1):
        exchange.begin(1.0)
        meter.begin(exchange, 24, 24)
        training.backward(model, exchange, step, 0, 24, seed)
        exchange.finish()
        meter.before_optimizer()
        optimizer.step()
        optimizer.zero_grad()
        rows.append(StepRow())
        meter.end(rows[-1])
    exchange.close()
    one = [torch.ones_like(param) for param in params]
    first, second = _gradient(seed, 0, 0, 24), _gradient(seed, 1, 0, 24)
    small = (_square(first, one) + _square(second, one)) / 2
    mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    return rows[0], rows[1], small, _square(mean, one)


def _paced(rank: int, world: int, seed: int) -> list[Any]:
    """Return the rows of four steps, of which the second is measured."""
    import torch

    from stoker_train.elastic.optimization import StepRow
    from stoker_train.elastic.optimization.measuring import NoiseMeter
    from stoker_train.elastic.sync.exchange import GradientExchange
    from tests.unit.train.elastic.sync import training

    model = training.Net(seed)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.0)
    exchange, meter = GradientExchange(params), NoiseMeter(optimizer)
    rows, size = [], 24 // world
    for step in range(4):
        exchange.begin(1.0 / world)
        meter.begin(exchange, size, 24, measures=step == 1, keeps=step == 0)
        training.backward(model, exchange, step, rank * size, size, seed)
        exchange.finish()
        meter.before_optimizer()
        squares = [float(one) for one in meter.squares]
        optimizer.step()
        optimizer.zero_grad()
        rows.append(StepRow())
        meter.end(rows[-1], squares)
    assert meter._before is None
    exchange.close()
    return rows


def test_a_clock_adds_up_phases() -> None:
    from stoker_train.elastic.optimization.measuring import StepClock, all_finite

    clock = StepClock()
    assert clock.seconds() == {}
    clock.mark("compute")  # before start: nothing
    clock.start()
    for phase in ("data", "compute", "data", "exchange"):
        clock.mark(phase)  # type: ignore[arg-type]
    seconds = clock.seconds()
    assert set(seconds) == {"data", "compute", "exchange"}
    assert all(value >= 0 for value in seconds.values())
    clock.start()
    assert clock.seconds() == {}
    assert all_finite([1.0, 2.0])
    assert not all_finite([1.0, math.nan])
