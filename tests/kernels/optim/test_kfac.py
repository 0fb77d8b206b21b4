"""K-FAC against the dense Fisher matrix of small nets, over steps, in state dicts and over processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.optim import KFAC
from tests.kernels.optim.kfac_worker import BATCH, PartlyCalled, model_of, train

WORKER = Path(__file__).with_name("kfac_worker.py")
DAMPING = 0.03
PLAIN: dict[str, Any] = {"momentum": 0.0, "kl_clip": None, "damping": DAMPING, "lr": 1.0}


def packed(layer: nn.Module, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """(..., O, I [+ 1]) of the layer's weights, flattened inputs, and its bias as the last column."""
    parts = [tensors[f"{name}.weight"].flatten(-(layer.weight.ndim - 1))]
    if layer.bias is not None:
        parts.append(tensors[f"{name}.bias"][..., None])
    return torch.cat(parts, -1)


def case_gradients(model: nn.Module, loss_of: Any, cases: int) -> list[dict[str, torch.Tensor]]:
    """The gradients of each case's own loss."""
    found = []
    for case in range(cases):
        model.zero_grad()
        loss_of(case).backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return found


def assert_natural_steps(
    model: nn.Module, loss_of: Any, cases: int, mean_loss: Any, inversion: str
) -> None:
    """One step of K-FAC is -(F + damping I)^-1 g, F the dense empirical Fisher matrix of each layer."""
    gradients = case_gradients(model, loss_of, cases)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = KFAC(model, inversion=inversion, **PLAIN)  # type: ignore[arg-type]
    mean_loss().backward()
    mean = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.step()
    moved = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    assert optimizer.factors
    for name, own in optimizer.factors.items():
        rows = torch.stack([packed(own.module, g, name).flatten() for g in gradients])
        fisher = rows.T @ rows / cases  # over (O, I)
        assert own.a is not None
        assert own.g is not None
        torch.testing.assert_close(torch.kron(own.g, own.a), fisher)
        if inversion == "eigen":
            damped = fisher + DAMPING * torch.eye(len(fisher), dtype=fisher.dtype)
        else:
            pi = (own.a.diagonal().mean() / own.g.diagonal().mean()).sqrt()
            root = DAMPING**0.5
            damped = torch.kron(
                own.g + root / pi * torch.eye(len(own.g), dtype=fisher.dtype),
                own.a + root * pi * torch.eye(len(own.a), dtype=fisher.dtype),
            )
        expected = torch.linalg.solve(damped, -packed(own.module, mean, name).flatten())
        torch.testing.assert_close(packed(own.module, moved, name).flatten(), expected)


@pytest.mark.parametrize("inversion", ["cholesky", "eigen"])
def test_one_case_is_exact_in_every_layer(inversion: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Tanh(), nn.Linear(3, 5, bias=False), nn.Tanh(),
        nn.Linear(5, 4),
    ).double()  # fmt: skip
    x, y = torch.randn(1, 2, 3, 3).double(), torch.tensor([2])

    def loss(case: int = 0) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    assert_natural_steps(model, loss, 1, loss, inversion)


@pytest.mark.parametrize("inversion", ["cholesky", "eigen"])
def test_a_linear_loss_of_all_pairs_is_exact(inversion: str) -> None:
    """Inputs and output gradients are independent there, which is what K-FAC assumes."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    inputs, weights = torch.randn(5, 4).double(), torch.randn(6, 3).double()
    x, w = inputs.repeat_interleave(6, 0), weights.repeat(5, 1)

    def loss_of(case: int) -> torch.Tensor:
        return (model(x[case]) * w[case]).sum()

    assert_natural_steps(model, loss_of, 30, lambda: (model(x) * w).sum(1).mean(), inversion)


def test_a_convolution_sums_over_places() -> None:
    """A and G by their definition: padded, strided, with a bias."""
    layer = nn.Conv2d(2, 3, (3, 2), stride=2, padding=1).double()
    model = nn.Sequential(layer)
    x = torch.randn(4, 2, 5, 6).double()
    optimizer = KFAC(model)
    y = model(x)
    w = torch.randn_like(y)
    (y * w).flatten(1).sum(1).mean().backward()
    places = y.shape[2] * y.shape[3]
    wide = F.pad(x, (1, 1, 1, 1))
    a = torch.zeros(13, 13).double()
    for n in range(4):
        for i in range(y.shape[2]):
            for j in range(y.shape[3]):
                patch = wide[n, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 2].flatten()
                patch = torch.cat([patch, torch.ones(1).double()])
                a += torch.outer(patch, patch) / 4
    rows = w.transpose(0, 1).flatten(1)
    optimizer.step()
    own = optimizer.factors["0"]
    torch.testing.assert_close(own.a, a)
    torch.testing.assert_close(own.g, rows @ rows.T / (4 * places))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_one_case_without_a_batch_dimension_is_a_batch_of_one(kind: str, by_name: bool) -> None:
    if kind == "linear":
        model, x = nn.Linear(4, 3), torch.randn(4)
    else:
        model, x = nn.Conv2d(2, 3, 2), torch.randn(2, 4, 5)
    found = []
    for given in (x[None], x):
        optimizer = KFAC(model)
        y = model(input=given) if by_name else model(given)
        y.square().sum().backward()
        estimate = optimizer.factors[""].take_gathered()
        assert estimate is not None
        found.append(estimate)
        optimizer.remove()
    torch.testing.assert_close(*found)


def test_averages_and_intervals() -> None:
    model = model_of()
    optimizer = KFAC(model, decay=0.7, factor_every=2, inverse_every=3)
    own = optimizer.factors["0"]
    expected, inverses = None, []
    for step in range(7):
        x = torch.randn(9, 6)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step % 2 == 0:
            rows = torch.cat([x, torch.ones(9, 1)], 1)
            batch, decay = rows.T @ rows / 9, min(0.7, 1 - 1 / (step // 2 + 1))
            expected = batch if expected is None else decay * expected + (1 - decay) * batch
        torch.testing.assert_close(own.a, expected)
        inverses.append(own.inverse[0])
    same = [inverses[i] is inverses[i - 1] for i in range(1, 7)]
    assert same == [True, True, False, True, True, False]


def fit(optimizer_of: Any, steps: int) -> tuple[list[float], nn.Module]:
    """Inputs of very different scales: what plain SGD is slow at."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(256, 8) * torch.logspace(-1, 1, 8)
    y = torch.stack([torch.sin(x[:, 0] * 5), x[:, 1] * 3], 1)
    optimizer, losses = optimizer_of(model), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("inversion", ["cholesky", "eigen"])
def test_100_steps(inversion: Any) -> None:
    ours, _ = fit(lambda m: KFAC(m, 0.1, inversion=inversion, kl_clip=1e-2), 100)
    sgd = min(
        fit(lambda m, lr=lr: torch.optim.SGD(m.parameters(), lr, 0.9), 100)[0][-1]
        for lr in (0.01, 0.03, 0.1)
    )
    assert ours[-1] < 0.2 * ours[0]
    assert ours[-1] < sgd


def test_a_clipped_step_has_the_bound() -> None:
    model = model_of()
    optimizer = KFAC(model, lr=0.5, momentum=0.0, kl_clip=1e-4)
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.randn(20, 6)).square().sum(1).mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    moved = sum(
        ((b - p.detach()) * g).sum()
        for b, p, g in zip(before, model.parameters(), gradients, strict=True)
    )
    # lr <v, g>: the bound is on lr^2 <v, g>, before v was scaled by the root of their ratio.
    assert moved > 0
    total = sum((p.grad * g).sum() for p, g in zip(model.parameters(), gradients, strict=True))
    unclipped = KFAC(copied := copy.deepcopy(model), lr=0.5, momentum=0.0, kl_clip=None)
    with torch.no_grad():
        for p, b, g in zip(copied.parameters(), before, gradients, strict=True):
            p.copy_(b)
            p.grad = g.clone()
    unclipped.load_state_dict(optimizer.state_dict())
    unclipped.steps = 1  # keeps the inverses
    unclipped.step()
    whole = sum((p.grad * g).sum() for p, g in zip(copied.parameters(), gradients, strict=True))
    torch.testing.assert_close(total, whole * (1e-4 / (0.25 * whole)).sqrt())


@pytest.mark.parametrize("inversion", ["cholesky", "eigen"])
def test_a_state_goes_on_with_the_same_bits(inversion: Any) -> None:
    def run(model: nn.Module, optimizer: KFAC, steps: range) -> None:
        for step in steps:
            x = torch.randn(9, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def make(model: nn.Module) -> KFAC:
        return KFAC(model, inverse_every=4, inversion=inversion)

    model = model_of()
    optimizer = make(model)
    run(model, optimizer, range(6))
    other = copy.deepcopy(model)
    for module in other.modules():
        module._forward_hooks.clear()  # of the first optimizer
    resumed = make(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(model, optimizer, range(6, 12))
    run(other, resumed, range(6, 12))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.timeout(200)
def test_two_processes_step_as_one(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment.pop("STOKER_KERNELS_BACKEND", None)
    environment.pop("TRITON_INTERPRET", None)
    outs = [tmp_path / f"{rank}.pt" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.optim.kfac_worker", str(rank), "2",
             str(tmp_path / "meet"), str(out)],
            env=environment, cwd=Path(__file__).parents[3],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    try:
        for process in processes:
            output, _ = process.communicate(timeout=150)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    first, second = (torch.load(out, weights_only=True) for out in outs)
    model = PartlyCalled()
    optimizer = KFAC(model, lr=0.1, inverse_every=1)
    train(model, optimizer, slice(0, BATCH))
    assert optimizer.factors["loose"].a is None
    for a, b, alone in zip(first, second, model.parameters(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, alone.detach(), rtol=1e-4, atol=1e-5)


def test_what_has_no_factors_moves_by_sgd() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 40))
    optimizer = KFAC(model, lr=0.1, momentum=0.0, largest=20)
    assert list(optimizer.factors) == ["0"]
    before = copy.deepcopy(model)
    x = torch.randn(5, 6)
    for m in (model, before):
        m(x).square().mean().backward()
    optimizer.step()
    for number in (1, 2):
        for ours, old in zip(model[number].parameters(), before[number].parameters(), strict=True):
            torch.testing.assert_close(ours, old - 0.1 * old.grad)
    optimizer.remove()
    model(x).square().mean().backward()
    assert optimizer.factors["0"].take_gathered() is None


def test_errors() -> None:
    model = model_of()
    for options, match in (
        ({"damping": 0.0}, "damping and kl_clip must be positive"),
        ({"decay": 1.0}, r"decay in \[0, 1\)"),
        ({"inverse_every": 0}, "at least 1 step"),
        ({"inversion": "svd"}, "expected cholesky or eigen"),
    ):
        with pytest.raises(ValueError, match=match):
            KFAC(model, **options)  # type: ignore[arg-type]
    state = KFAC(nn.Sequential(nn.Linear(2, 2))).state_dict()
    state["kfac"]["layers"]["9"] = {}
    with pytest.raises(ValueError, match="the state has a layer '9'"):
        KFAC(nn.Sequential(nn.Linear(2, 2))).load_state_dict(state)
