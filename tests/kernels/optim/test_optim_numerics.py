"""The optimizers' numbers: every backend against torch.optim and the papers' formulas in fp64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from stoker_kernels import LAMB, LARS, SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop
from stoker_kernels.optim import reference
from stoker_kernels.optim.hyper import adam_hyper
from tests.kernels._numerics import assert_close, poison_empty
from tests.kernels.optim._optim import SHAPES, starts, train

ADAM = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TORCH: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (AdamW, torch.optim.AdamW, ADAM),
    "adamw_maximize": (AdamW, torch.optim.AdamW, {**ADAM, "maximize": True}),
    "adam": (Adam, torch.optim.Adam, ADAM),
    "adam_beta_0": (Adam, torch.optim.Adam, {**ADAM, "betas": (0.0, 0.9)}),
    "sgd": (SGD, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "sgd_dampening": (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.4}),
    "sgd_nesterov": (
        SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    "adagrad": (Adagrad, torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}),
    "adagrad_options": (
        Adagrad, torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.3, "maximize": True},
    ),
    "adadelta": (Adadelta, torch.optim.Adadelta, {"lr": 0.9, "rho": 0.8, "weight_decay": 0.1}),
    "rmsprop": (RMSprop, torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.1}),
    "rmsprop_momentum": (RMSprop, torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.8}),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_matches_torch(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
    ours, theirs, options = TORCH[name]
    start = starts()
    steps = 100 if backend != "triton" else 6  # 100 steps of every kernel: tests/gpu
    kernel = train(ours, start, steps, **options)
    witness = train(theirs, start, steps, **options)
    oracle = train(theirs, start, steps, torch.float64, **options)
    for shape, *results in zip(SHAPES, kernel, witness, oracle, strict=True):
        assert_close(*results, str(shape))


@pytest.mark.parametrize("name", ["adamw", "adagrad", "adadelta", "rmsprop_momentum"])
def test_the_kernel_matches_torch_over_100_steps(interpreter: None, name: str) -> None:
    ours, theirs, options = TORCH[name]
    start = [torch.randn(8, 16)]
    kernel = train(ours, start, 100, **options)
    witness = train(theirs, start, 100, **options)
    oracle = train(theirs, start, 100, torch.float64, **options)
    assert_close(kernel[0], witness[0], oracle[0])
    torch.testing.assert_close(kernel[0], witness[0], rtol=2e-6, atol=1e-6)


class Textbook(torch.optim.Optimizer):
    """LAMB and LARS as the papers' algorithms have them, line by line, without any of our code."""

    def __init__(self, params: list[torch.Tensor], kind: str, **options: Any) -> None:
        super().__init__(params, {"kind": kind, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                getattr(self, group["kind"])(p, group, self.state[p])

    def lamb(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        b1, b2 = group["betas"]
        t = state["t"] = state.get("t", 0) + 1
        m = state["m"] = b1 * state.get("m", torch.zeros_like(p)) + (1 - b1) * p.grad
        v = state["v"] = b2 * state.get("v", torch.zeros_like(p)) + (1 - b2) * p.grad**2
        r = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
        u = r + group["weight_decay"] * p
        phi = p.norm().clamp(*group.get("norm_bounds", (0.0, math.inf)))
        ratio = phi / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
        p -= group["lr"] * (ratio if group.get("adapt", True) else 1.0) * u

    def lars(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        ratio = group["trust_coefficient"] * p.norm() / (p.grad.norm() + decay * p.norm())
        ratio = ratio if p.norm() > 0 and p.grad.norm() > 0 else 1.0
        rate = group["lr"] * (ratio if group.get("adapt", True) else 1.0)
        v = state.get("v", torch.zeros_like(p))
        state["v"] = group["momentum"] * v + rate * (p.grad + decay * p)
        p -= state["v"]


LAMB_OPTIONS = {"lr": 2e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
LARS_OPTIONS = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.01, "trust_coefficient": 0.02}
PAPERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "lamb": (LAMB, "lamb", LAMB_OPTIONS),
    "lamb_bounds": (LAMB, "lamb", {**LAMB_OPTIONS, "norm_bounds": (1.5, 9.0)}),
    "lamb_eps_0": (LAMB, "lamb", {**LAMB_OPTIONS, "eps": 0.0}),
    "lamb_plain": (LAMB, "lamb", {**LAMB_OPTIONS, "adapt": False}),
    "lars": (LARS, "lars", LARS_OPTIONS),
    "lars_plain": (LARS, "lars", {**LARS_OPTIONS, "lr": 0.01, "adapt": False}),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's 0 / 0 in lanes that are masked
@pytest.mark.parametrize("name", PAPERS)
def test_matches_the_paper(backend: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
    ours, kind, options = PAPERS[name]
    start = starts()
    start[2].zero_()  # its first ratio is 1
    steps = 100 if backend != "triton" else 6
    kernel = train(ours, start, steps, **options)
    witness = train(Textbook, start, steps, kind=kind, **options)
    oracle = train(Textbook, start, steps, torch.float64, kind=kind, **options)
    for shape, *results in zip(SHAPES, kernel, witness, oracle, strict=True):
        assert_close(*results, str(shape))


@pytest.mark.parametrize("make", [AdamW, LAMB])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_fp32_states(
    backend: str, make: Any, dtype: torch.dtype
) -> None:
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    theirs = torch.optim.AdamW if make is AdamW else partial(Textbook, kind="lamb")
    start = starts(dtype)
    kernel = train(make, start, 1, dtype, **options)
    oracle = train(theirs, start, 1, torch.float64, **options)
    for shape, a, b in zip(SHAPES, kernel, oracle, strict=True):
        assert_close(a, b.to(dtype), b, str(shape))


@pytest.mark.parametrize("magnitude", [1e-4, 3.0, 1e4])
@pytest.mark.parametrize("name", ["adamw", "lars"])
def test_extreme_magnitudes(backend: str, name: str, magnitude: float) -> None:
    make, theirs, options = (
        TORCH[name] if name in TORCH else (LARS, partial(Textbook, kind="lars"), LARS_OPTIONS)
    )
    start = [magnitude * s for s in starts()]
    kernel, witness = train(make, start, 3, **options), train(theirs, start, 3, **options)
    for *results, c in zip(
        kernel, witness, train(theirs, start, 3, torch.float64, **options), strict=True
    ):
        assert_close(*results, c)


def test_bias_corrections_are_exact_to_fp32(interpreter: None) -> None:
    """1 - beta^t over 100k steps against fp64, where fp32's own power loses four digits."""
    from stoker_kernels.optim.triton import kernels, scalar_kernels

    steps = [0, 1, 2, 6, 9, 99, 692, 694, 9_999, 99_999]
    group = {"betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 0.0, "maximize": False}
    hyper = torch.tensor(adam_hyper(group, 1.0, decoupled=True), dtype=torch.float32)
    counters = [torch.tensor(float(step)) for step in steps]
    table = torch.zeros(len(steps), 8, dtype=torch.int64)
    table[:, 4] = torch.tensor([c.data_ptr() for c in counters])
    scalars = torch.full((len(steps), 16), math.nan)
    scalar_kernels.scalars_kernel[(1,)](
        table, hyper, None, None, scalars, len(steps), RULE=scalar_kernels.LAMB, BLOCK=16
    )
    for row, before, counter in zip(scalars.double(), steps, counters, strict=True):
        t = before + 1
        assert counter == t
        first, second = row[kernels.CORRECTION1.value], row[kernels.CORRECTION2.value]
        assert first.item() == pytest.approx(1 / (1 - 0.9**t), rel=5e-7)
        assert second.item() == pytest.approx((1 - 0.999**t) ** -0.5, rel=5e-7)


@pytest.mark.parametrize("rule", ["adam", "sgd", "adagrad"])
def test_the_cpu_path_is_the_specification(rule: str) -> None:
    """In fp64, where rounding cannot hide a difference."""
    make = {
        "adam": AdamW,
        "sgd": partial(SGD, momentum=0.9, dampening=0.2),
        "adagrad": partial(Adagrad, lr_decay=0.2, weight_decay=0.1),
    }[rule]
    start = starts(torch.float64)
    fast = train(make, start, 5, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_KERNELS_BACKEND", "reference")
        slow = train(make, start, 5, torch.float64)
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [AdamW, Adam, SGD, LAMB, LARS, Adagrad, Adadelta, RMSprop])
def test_repeats_bit_for_bit(backend: str, make: Any, dtype: torch.dtype) -> None:
    start = starts(dtype)
    first, second = train(make, start, 2, dtype), train(make, start, 2, dtype)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rounding_up_or_down_at_random(backend: str) -> None:
    """Each result is a neighbour in bf16, their mean the exact value, the draw repeatable."""
    one, ulp, steps = 1.0, 2.0**-7, 3
    exact = one - 0.3 * ulp / 2  # below 1 neighbours are half an ulp apart
    p = torch.nn.Parameter(torch.full((4096,), one).bfloat16())
    drawn = []
    for seed in (0, 0, 1):
        optimizer = SGD([p], lr=0.3 * ulp / 2, stochastic_rounding=True, seed=seed)
        for _ in range(steps):
            with torch.no_grad():
                p.fill_(one)
            p.grad = torch.ones_like(p)
            optimizer.step()
            drawn.append(p.detach().float())
    assert set(torch.cat(drawn).tolist()) == {one, one - ulp / 2}
    share = torch.stack(drawn[steps:]).ne(one).float().mean().item()
    n = 2 * steps * 4096
    assert abs(share - 0.3) < 5 * math.sqrt(0.21 / n), exact
    assert all(
        torch.equal(a, b) for a, b in zip(drawn[:steps], drawn[steps : 2 * steps], strict=True)
    )
    assert not torch.equal(drawn[0], drawn[1])  # another step
    assert not torch.equal(drawn[0], drawn[2 * steps])  # another seed


def test_the_kernel_rounds_as_the_specification(interpreter: None) -> None:
    """Bit for bit, on a transposed tensor and beside what is no number."""
    results = []
    for choice in ("triton", "reference"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STOKER_KERNELS_BACKEND", choice)
            torch.manual_seed(3)
            params = [torch.randn(33, 7).t().bfloat16(), torch.randn(2100).bfloat16()]
            params[1][3] = math.nan
            params = [torch.nn.Parameter(p) for p in params]
            optimizer = SGD(params, lr=2.0**-9, stochastic_rounding=True, seed=2**50 + 1)
            for p in params:
                p.grad = torch.randn(p.shape).bfloat16()
            optimizer.step()
            results.append([p.detach() for p in params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("choice", ["auto", "reference"])
def test_small_updates_are_not_lost_on_average(
    choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 steps of a tenth of what rounding to nearest would see; the kernel rounds the same, see above."""
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", choice)
    moved = []
    for stochastic in (False, True):
        p = torch.nn.Parameter(torch.ones(64).bfloat16())
        optimizer = SGD([p], lr=1e-4, stochastic_rounding=stochastic)
        for _ in range(100):
            p.grad = torch.ones_like(p)
            optimizer.step()
        moved.append(1.0 - p.detach().double().mean().item())
    assert moved[1] == pytest.approx(1e-2, rel=0.25)
    assert moved[0] == 0.0


def test_specification_is_the_textbook_step() -> None:
    p, g = torch.tensor([2.0]).double(), torch.tensor([0.5]).double()
    group = {"betas": (0.9, 0.99), "weight_decay": 0.5, "eps": 0.0, "maximize": False}
    h = adam_hyper(group, 0.1, decoupled=True)
    h = type(h)(*torch.tensor(h).double())
    zero = [torch.zeros(1).double(), torch.zeros(1).double()]
    # First step: m^ = g, v^ = g^2, so p = p (1 - lr wd) - lr sign(g).
    new, _ = reference.adam(p, g, zero, torch.tensor(1.0), h)
    torch.testing.assert_close(new, torch.tensor([2.0 * 0.95 - 0.1]).double(), rtol=1e-6, atol=0)
