"""Plans costed by measured passes, and what measures them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker_train.planning import ClusterShape, Link, Strategy, plan_strategy, plan_training
from stoker_train.planning.model_shape import transformer
from stoker_train.planning.profiles.profile import Pass, Profile
from stoker_train.planning.profiles.profiling import profile_model
from stoker_train.planning.strategy import Recompute

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = transformer("gpt", layers=8, hidden=256, heads=4, vocab=1000, tied=False)
FREE = Link(1e30, 0.0)
CLUSTER = ClusterShape(1, 4, 80e9, 1e12, inside=FREE, between=FREE, memory_bytes_per_s=1e30)
PROFILE = Profile(
    layer_forward=Pass(0.001, 0.010),
    layer_backward=Pass(0.002, 0.020),
    ends_forward=Pass(0.0, 0.004),
    ends_backward=Pass(0.0, 0.008),
    whole_share=0.2,
    update_s=1e-9,
)


def step_s(strategy: Strategy, profile: Profile = PROFILE) -> float:
    plan = plan_strategy(SHAPE, strategy, cluster=CLUSTER, seq_len=128, profile=profile)
    return plan.time.total_s - plan.time.update_s


def test_a_step_is_the_sum_of_the_passes_that_were_measured() -> None:
    one = step_s(Strategy(micro_batch=2, micro_batches=3))
    assert one == pytest.approx(3 * (8 * (0.003 + 2 * 0.030) + 2 * 0.012))
    full = step_s(Strategy(micro_batch=2, recompute=Recompute.FULL))
    assert full == pytest.approx(8 * (0.004 + 2 * 0.040) + 2 * 0.012)
    cut = step_s(Strategy(tensor=2, micro_batch=2))
    assert cut == pytest.approx(8 * (0.003 + 2 * 0.030 * (0.2 + 0.8 / 2)) + 2 * 0.012 / 2)
    all_cut = step_s(Strategy(tensor=2, sequence=True, micro_batch=2))
    assert all_cut == pytest.approx(8 * (0.003 + 2 * 0.030 / 2) + 2 * 0.012 / 2)
    plan = plan_strategy(SHAPE, Strategy(), cluster=CLUSTER, seq_len=128, profile=PROFILE)
    assert plan.time.update_s == pytest.approx(SHAPE.parameters * 1e-9, rel=0.01)


def test_exchange_hides_beside_no_more_than_the_overlap_of_a_cluster() -> None:
    slow = replace(CLUSTER, inside=Link(1e8, 0.0))
    found = {}
    for overlap in (0.0, 0.5, 1.0):
        for cost in (1.0, 2.0):
            cluster = replace(slow, overlap=overlap, reduce_scatter_cost=cost)
            plan = plan_strategy(
                SHAPE, Strategy(data=2, zero=2), cluster=cluster, seq_len=128, profile=PROFILE
            )
            found[overlap, cost] = plan.time.data_s
    gather = SHAPE.parameters * 2 / 2 / 1e8
    assert found[0.0, 1.0] == pytest.approx(2 * gather, rel=0.02)
    assert found[0.0, 2.0] == pytest.approx(3 * gather, rel=0.02)
    assert found[0.0, 1.0] > found[0.5, 1.0] >= found[1.0, 1.0] >= gather * 0.98


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Pass(-1.0, 0.0), "Pass: fixed_s must be seconds from 0"),
        (lambda: Pass(0.0, float("nan")), "Pass: sequence_s must be seconds from 0"),
        (lambda: replace(PROFILE, whole_share=1.5), "whole_share must lie in"),
        (lambda: replace(PROFILE, update_s=-1.0), "update_s must be seconds"),
        (lambda: replace(PROFILE, layer_forward=Pass(0.0, 0.0)), "must take time"),
        (lambda: replace(CLUSTER, overlap=2.0), "overlap must lie in"),
        (lambda: replace(CLUSTER, reduce_scatter_cost=0.0), "reduce_scatter_cost must be above 0"),
        (lambda: step_s(Strategy(data=8)), "takes 8 GPUs, and the cluster has 4"),
        (lambda: step_s(Strategy(pipeline=4, interleave=4)), "4 x 4 stages of 8 layers"),
        (
            lambda: plan_strategy(
                replace(SHAPE, embedding_parameters=10**11), Strategy(), cluster=CLUSTER, seq_len=8
            ),
            "GPU memory, and has",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


class Rule:
    """An optimizer; torch's own would import triton before its interpreter can be asked for."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.state: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self) -> None:
        for one in self.parameters:
            assert one.grad is not None
            self.state[one] = one.grad
            one.add_(1.0)


def test_the_passes_of_a_model_are_measured() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)
        )
        for _ in range(3)
    ]  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), *blocks, torch.nn.Linear(64, 8))
    before = [one.detach().clone() for one in model.parameters()]

    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(count, 64, 8), torch.randn(count, 64, 8)

    optimizer: Any = Rule(list(model.parameters()))
    loss_fn = torch.nn.functional.mse_loss
    found = profile_model(model, batch, loss_fn, layers=blocks, optimizer=optimizer)
    assert found.layer_forward.seconds(4) > 0
    assert found.layer_backward.seconds(4) > 0
    assert 0 < found.whole_share < 1
    assert found.update_s > 0
    assert not optimizer.state
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None
    plans = plan_training(SHAPE, cluster=CLUSTER, batch=4, seq_len=64, profile=found)
    assert plans.best.time.total_s > 0
    with pytest.raises(ValueError, match="sizes must be two growing numbers"):
        profile_model(model, batch, loss_fn, layers=blocks, sizes=(4, 1))
    with pytest.raises(ValueError, match="layers is empty"):
        profile_model(model, batch, loss_fn, layers=[])
    with pytest.raises(ValueError, match="no layer was called"):
        profile_model(model, batch, loss_fn, layers=[torch.nn.Linear(1, 1)])
