"""Models that are cut over ranks train as one process does, and send the bytes that theory says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import stoker_kernels as ours
from stoker.exceptions import BadRequestError
from stoker_train.planning.strategy import Recompute, Strategy
from stoker_train.sharded.parallel import offload
from stoker_train.sharded.parallel.mesh import PIPELINE
from tests.kernels.sharded._models import KINDS, batches, loss_of, make_model, train_alone
from tests.kernels.sharded._rank_cases import (
    BATCH_NORMS,
    OPTIMIZERS,
    STEPS,
    Anyones,
    Branches,
    batch_of,
    run_all,
)
from tests.unit.train.elastic import rank_processes

if TYPE_CHECKING:
    from pathlib import Path

RANKS = 4
WAIT_S = 600.0
"""For all cases together, beside other work."""
pytestmark = pytest.mark.timeout(WAIT_S + 60.0)
ZERO = [
    Strategy(data=4, zero=zero, micro_batch=2 // many, micro_batches=many)
    for zero in (0, 1, 2, 3)
    for many in (1, 2)
]
TENSOR = [
    Strategy(tensor=4, micro_batch=8, sequence=True),
    Strategy(data=2, tensor=2, micro_batch=2, micro_batches=2, zero=3),
    Strategy(data=2, tensor=2, micro_batch=4, zero=1, sequence=True),
]
RECOMPUTED = [
    Strategy(tensor=4, micro_batch=8),
    Strategy(data=2, tensor=2, micro_batch=4, sequence=True, recompute=Recompute.SELECTIVE),
    Strategy(data=2, tensor=2, micro_batch=4, zero=2, recompute=Recompute.FULL),
]
TRAFFIC = [
    *ZERO,
    Strategy(tensor=4, micro_batch=8),
    Strategy(tensor=4, micro_batch=8, sequence=True),
    Strategy(tensor=4, micro_batch=8, recompute=Recompute.SELECTIVE),
    Strategy(tensor=4, micro_batch=8, recompute=Recompute.FULL),
]


def tensor_strategies(kind: str) -> list[Strategy]:
    """Those whose degree divides the heads; more of them where our kernels run."""
    if kind == "grouped":
        return [one for one in TENSOR if one.tensor == 2]
    return TENSOR + RECOMPUTED if kind == "gpt" else TENSOR


class Found:
    """What every rank found, by case."""

    def __init__(self, results: list[dict[str, Any]]) -> None:
        self.results = results

    def of(self, case: str, rank: int = 0) -> Any:
        found = self.results[rank][case]
        if isinstance(found, Exception):
            raise found
        return found

    def by_rank(self, case: str) -> list[Any]:
        return [self.of(case, rank) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All cases, run once in four processes."""
    folder = tmp_path_factory.mktemp("ranks")
    cases: dict[str, tuple[Any, ...]] = {
        "zero": ("train_all", "gpt", ZERO, STEPS),
        "traffic": ("train_all", "llama", TRAFFIC, 1),
        **{kind: ("train_all", kind, tensor_strategies(kind), STEPS) for kind in KINDS},
        "offloaded": ("offloaded", str(folder / "states")),
        **{
            name: (name,)
            for name in (
                "branches", "by_names", "clip", "mixed", "recomputed", "normalize", "refused", "places",
            )
        },
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_processes, "WAIT_S", WAIT_S)
        processes = rank_processes.RankProcesses(
            RANKS, folder, ["torch._dynamo", "tests.kernels.sharded._rank_cases"]
        )
        try:
            return Found(processes.run(run_all, RANKS, cases))
        finally:
            processes.close()


def assert_alike(
    found: tuple[list[float], dict[str, torch.Tensor]],
    alone: tuple[list[float], dict[str, torch.Tensor]],
    what: object,
) -> None:
    assert found[0] == pytest.approx(alone[0], rel=1e-5), what
    assert found[1].keys() >= alone[1].keys(), what  # a tied one has both names
    for name, weight in alone[1].items():
        torch.testing.assert_close(
            found[1][name], weight, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{what}: {n}: {m}"
        )


def test_zero_trains_as_one_process(found: Found) -> None:
    alone = train_alone(make_model("gpt"), STEPS)
    for strategy, result in zip(ZERO, found.of("zero"), strict=True):
        assert_alike(result[:2], alone, strategy)
        assert result[0] == pytest.approx(alone[0], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_parallel_models_train_as_one_process(found: Found, kind: str) -> None:
    alone = train_alone(make_model(kind), STEPS)
    for strategy, result in zip(tensor_strategies(kind), found.of(kind), strict=True):
        assert_alike(result[:2], alone, strategy)


def test_bytes_are_those_of_theory(found: Found) -> None:
    """ZeRO-1 and 2 move 2 P, ZeRO-3 3 P; sequences cut move what tensor parallelism alone does."""
    model = make_model("llama")
    whole = sum(p.numel() * 4 for p in model.parameters())
    norms = sum(p.numel() * 4 for name, p in model.named_parameters() if "norm" in name)
    *zero, plain, cut, selective, full = found.of("traffic")
    parameters = [2, 2, 2, 2, 2, 3, 3, 6]  # of P (n - 1) / n, at one micro-batch and at two
    for strategy, times, (_, _, _, sent) in zip(ZERO, parameters, zero, strict=True):
        assert sum(sent.values()) == pytest.approx(times * whole * 3 / 4), strategy
        assert {dim for _, dim in sent} == {"data"}
    assert zero[0][2] == {("all_reduce", "data"): whole}
    assert zero[6][2] == {("all_gather", "data"): 2 * whole, ("reduce_scatter", "data"): whole}
    sums = 2 * norms * 3 / 4  # of gradients, as each rank normalises its own tokens
    assert sum(cut[3].values()) - sums == pytest.approx(sum(plain[3].values()))
    assert selective[3] == plain[3]
    activations = 8 * 16 * 32 * 4
    # In each of two layers attention's output is reduced again; nothing needs that of the MLP.
    again = 2 * 2 * activations * 3 / 4
    assert sum(full[3].values()) == pytest.approx(sum(plain[3].values()) + again)


def test_anyones_model_is_cut_by_names(found: Found) -> None:
    for strategy, weights in found.of("by_names"):
        _, alone = train_alone(Anyones(scaled=not strategy.sequence), STEPS)
        for name, weight in alone.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=2e-6)


def test_each_gradient_counts_once_in_the_norm(found: Found) -> None:
    model = make_model("gpt")
    (batch,) = batches(1)
    loss_of(model, *batch).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    results = found.by_rank("clip")
    whole = (64 * 16.0 + 64 * 9.0 + 4 * 4.0) ** 0.5
    for result in results:
        pipeline = result.pop("pipeline")
        assert pipeline == pytest.approx([whole, 2.0 / whole], rel=1e-5)
        for strategy, norms in result.items():
            assert norms == pytest.approx([expected, expected, 0.01], rel=2e-4), strategy
            assert norms[0] == pytest.approx(expected, rel=1e-5), strategy


def test_ranks_may_use_other_parameters_and_evaluate_before_an_update(found: Found) -> None:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    alone = []
    for _ in range(3):
        rows = torch.linspace(-1, 1, 16).view(4, 1, 4)
        loss = torch.stack([model(x, torch.tensor([n])) for n, x in enumerate(rows)]).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        alone.append(pytest.approx((loss.item(), loss.item(), float(norm)), rel=1e-5))
    for result in found.by_rank("branches"):
        assert result == [alone] * 4


def test_states_live_in_files_between_steps(found: Found) -> None:
    whole = 2 * 4 * sum(p.numel() for p in make_model("llama").parameters())
    for nbytes in found.by_rank("offloaded"):
        assert nbytes == pytest.approx(whole / 4, rel=0.02)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("to", ["cpu", "folder"])
def test_an_offloaded_optimizer_is_the_same_on_plain_parameters(
    name: str, to: str, tmp_path: Path
) -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        total = sum(layer(torch.ones(2, 5)).square().sum() for layer in model)
        total.backward()  # type: ignore[union-attr]
        return total  # type: ignore[return-value]

    models = [nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, away = (OPTIMIZERS[name](model.parameters()) for model in models)
    offload.offload_optimizer(
        away, "cpu" if to == "cpu" else tmp_path, at_a_time_nbytes=1 if to == "cpu" else 220
    )
    scheduler = torch.optim.lr_scheduler.StepLR(away, 1, 1.0)
    for _ in range(4):
        for model, optimizer in zip(models, (plain, away), strict=True):
            optimizer.zero_grad()
            assert optimizer.step(lambda m=model: loss(m)) is not None
        scheduler.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    if name == "ours":
        torch.testing.assert_close(away.grad_square_sum, plain.grad_square_sum)  # type: ignore[attr-defined]


def test_clipping_inside_of_an_offloaded_optimizer_is_refused() -> None:
    optimizer = ours.AdamW([nn.Parameter(torch.ones(2))], max_grad_norm=1.0)
    with pytest.raises(BadRequestError, match="max_grad_norm does not go with offload"):
        offload.offload_optimizer(optimizer)


def test_products_are_in_16_bit_and_masters_in_fp32(found: Found) -> None:
    losses, _ = train_alone(make_model("llama"), STEPS)
    for seen, kept, own in found.of("mixed"):
        assert seen == {(torch.bfloat16, torch.bfloat16)}
        assert kept == {(torch.float32, torch.float32)}
        assert own[0] == pytest.approx(losses[0], rel=5e-3)
        assert own[0] != losses[0]


def test_recomputation_changes_no_gradient(found: Found) -> None:
    results = found.by_rank("recomputed")
    for cut, (none, selective, full) in results[0].items():
        assert (none[2], selective[2], full[2]) == (2, 4, 4), cut
        for kind in (selective, full):
            assert kind[0] == none[0], cut
            assert kind[3] == none[3], cut
            for a, b in zip(kind[1], none[1], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    # Ranks of a tensor group see one loss and draw alike afterwards, whatever each of them dropped.
    for cut in list(results[0])[1:]:
        (one, *_), (other, *_) = (results[rank][cut] for rank in (0, 1))
        assert one[0] == other[0]
        assert one[3] == other[3]


def test_batch_norms_see_the_whole_batch(found: Found) -> None:
    results = found.by_rank("normalize")
    for number, (make, dims) in enumerate(BATCH_NORMS):
        model = make()
        x, factor = batch_of(dims)
        x.requires_grad_()
        y = model(x)
        (y * factor).sum().backward()
        close = {"rtol": 1e-5, "atol": 1e-5}
        parts = [result[number] for result in results]
        torch.testing.assert_close(torch.cat([p[0] for p in parts]), y.detach(), **close)
        torch.testing.assert_close(torch.cat([p[1] for p in parts]), x.grad, **close)
        for own, gradients in zip(
            model.parameters(), zip(*(p[2] for p in parts), strict=True), strict=True
        ):
            torch.testing.assert_close(sum(gradients), own.grad, **close)
        for name, buffer in model.named_buffers():
            for part in parts:
                torch.testing.assert_close(part[3][name], buffer, **close)
        model.eval()
        if model.track_running_stats:
            torch.testing.assert_close(torch.cat([p[4] for p in parts]), model(x).detach(), **close)


FIELDS = [
    "plan", "expert", "heads", "kv_heads", "width", "vocab", "tensor_plan", "tensor_plan",
    "tensor_plan", "tensor_plan", "tensor_plan", "sequence", "zero", "sequence", "precision", "recompute",
    "max_norm",
]  # fmt: skip


def test_errors_name_the_field_and_the_fix(found: Found) -> None:
    refused = found.of("refused")
    assert [field for field, _ in refused] == FIELDS, refused
    assert all(len(text.split("\n")) == 2 for _, text in refused), refused
    assert "tensor 4 does not divide kv_heads 2 of layers.0.attention" in refused[3][1]
    assert "take a plan with tensor=2" in refused[3][1]


def test_ranks_lie_as_the_plan_says(found: Found) -> None:
    for rank, result in enumerate(found.by_rank("places")):
        for inside, (at, counted) in zip((False, True), result, strict=True):
            degrees = Strategy(data=2, pipeline=2, pipeline_inside=inside)
            data, tensor, stage = at
            assert rank == tensor + data * degrees.data_stride + stage * degrees.pipeline_stride
            assert counted == {("all_reduce", PIPELINE): 24}
