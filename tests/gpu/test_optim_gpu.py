"""The optimizers on a real GPU: torch's numbers over 100 steps, CUDA graphs, size, determinism, no waits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from stoker_kernels import (  # noqa: E402
    LAMB,
    LARS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    RMSprop,
)
from tests.kernels._numerics import assert_close  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]
SHAPES = [(1,), (1000, 77), (0,), (4099,), (512, 1024)]
ALL: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (LAMB, {"lr": 1e-2}),
    (LARS, {"lr": 1.0, "trust_coefficient": 0.02, "weight_decay": 0.01}),
    (Adagrad, {"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.1}),
    (Adadelta, {"lr": 1.0, "weight_decay": 0.1}),
    (RMSprop, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}),
]


@pytest.fixture(autouse=True)
def _compiled_and_seeded() -> None:
    triton = pytest.importorskip("triton", reason="the CUDA path needs triton")
    from stoker_kernels.optim.triton.kernels import adam_kernel
    from stoker_kernels.runtime.launch import is_interpreted

    if is_interpreted(adam_kernel):
        pytest.skip(
            f"triton {triton.__version__} is interpreted in this process: run tests/gpu alone"
        )
    torch.manual_seed(0)


def parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, device="cuda").to(dtype) for shape in SHAPES]


def train(make: Any, start: list[torch.Tensor], dtype: torch.dtype, steps: int) -> tuple[Any, Any]:
    """Parameters after ``steps`` steps on gradients rounded to the start's dtype; the optimizer."""
    params = [torch.nn.Parameter(s.to(dtype, copy=True)) for s in start]
    optimizer = make(params)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        for p, s in zip(params, start, strict=True):
            grad = torch.randn(p.shape, device="cuda", generator=generator)
            p.grad = grad.to(s.dtype).to(dtype)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize(("make", "options"), ALL)
def test_matches_over_100_steps(
    make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch's, the fused ones where there are; LAMB and LARS: the reference."""
    start = parameters(torch.float32)
    ours, optimizer = train(lambda p: make(p, **options), start, torch.float32, 100)
    expected = torch.stack([p.grad.double().square().sum() for p in ours])
    sums = optimizer.grad_square_sums.double()
    torch.testing.assert_close(sums, expected, rtol=1e-5, atol=0.0)
    theirs = getattr(torch.optim, make.__name__, None)
    if theirs is None:
        monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
        theirs, fused = make, {}
    else:
        fused = {"fused": True} if make in (AdamW, Adam, SGD) else {}
    witness, _ = train(lambda p: theirs(p, **options, **fused), start, torch.float32, 100)
    oracle, _ = train(lambda p: theirs(p, **options), start, torch.float64, 100)
    for shape, *results in zip(SHAPES, ours, witness, oracle, strict=True):
        assert_close(*results, str(shape), terms=4.0)


@pytest.mark.parametrize("stochastic_rounding", [True, False])
@pytest.mark.parametrize(("make", "options"), ALL)
def test_repeats_bit_for_bit(make: Any, options: dict[str, Any], stochastic_rounding: bool) -> None:
    options = {**options, "stochastic_rounding": stochastic_rounding}
    start = parameters(torch.bfloat16)
    first, second = (train(lambda p: make(p, **options), start, torch.bfloat16, 3)[0] for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rounds_as_the_specification(monkeypatch: pytest.MonkeyPatch) -> None:
    start = [torch.randn(1000, 77, device="cuda").bfloat16().t()]
    make = lambda p: SGD(p, lr=2.0**-9, stochastic_rounding=True, seed=7)  # noqa: E731
    ours, _ = train(make, start, torch.bfloat16, 1)
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    assert torch.equal(ours[0], train(make, start, torch.bfloat16, 1)[0][0])


@pytest.mark.parametrize("lr_is_tensor", [True, False])
@pytest.mark.parametrize(("make", "options"), ALL)
def test_a_captured_step_is_the_eager_one(
    make: Any, options: dict[str, Any], lr_is_tensor: bool
) -> None:
    """With gradients allocated inside the capture, clipping, rounding, and a rate that changes."""
    finals = []
    for captured in (True, False):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(65, 33), torch.nn.Linear(33, 8)).cuda()
        model = model.bfloat16()
        x = torch.randn(16, 65, device="cuda").bfloat16()
        lr = torch.tensor(options["lr"], device="cuda") if lr_is_tensor else options["lr"]
        optimizer = make(
            model.parameters(), **{**options, "lr": lr}, stochastic_rounding=True, max_grad_norm=1.0
        )

        def step(model: Any = model, x: Any = x, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).float().square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                step()
        for number in range(4):
            if number == 2 and lr_is_tensor:
                lr.fill_(options["lr"] / 8)
            elif number == 2:
                optimizer.param_groups[0]["lr"] = options["lr"] / 8
                optimizer.upload_hyperparameters()
            if captured:
                graph.replay()
            else:
                step()
        sums = optimizer.grad_square_sums.clone()
        finals.append([*(p.detach().clone() for p in model.parameters()), sums])
    for a, b in zip(*finals, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("make", "options"), ALL)
def test_grad_scaler_skips_without_waiting(make: Any, options: dict[str, Any]) -> None:
    p = torch.nn.Parameter(torch.randn(4099, device="cuda"))
    optimizer = make([p], **options)
    p.grad = torch.randn_like(p)
    optimizer.step()
    before = [p.detach().clone(), *(s.clone() for s in optimizer.state[p].values())]
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones((), device="cuda"))
    p.grad[7] = float("nan")
    torch.cuda.set_sync_debug_mode("error")
    try:
        scaler.step(optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(before, [p, *optimizer.state[p].values()], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("make", "options"), ALL)
def test_a_step_does_not_wait_for_the_device(make: Any, options: dict[str, Any]) -> None:
    """Not even the first, that builds the table, nor one after the rate changed."""
    params = [torch.nn.Parameter(s) for s in parameters(torch.float32)]
    optimizer = make(params, **options, max_grad_norm=1.0)
    for p in params:
        p.grad = torch.randn_like(p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lr in (0.1, 0.1, 0.05):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_past_2_to_the_31_elements() -> None:
    numel = 2**31 + 4096
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    p = torch.nn.Parameter(torch.ones(numel, device="cuda", dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = SGD([p], lr=0.5)
    optimizer.step()
    assert (p[-5000:] == 0.5).all()
    assert (p[:5000] == 0.5).all()
    assert optimizer.grad_square_sum.item() == pytest.approx(numel, rel=1e-6)
