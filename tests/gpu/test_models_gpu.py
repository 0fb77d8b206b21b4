"""Models and statistics on a GPU: the captured step, bf16 training, and nothing that waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from stoker_kernels.models.capture import CapturedStep  # noqa: E402
from stoker_kernels.models.config import gpt2_small  # noqa: E402
from stoker_kernels.statistics import (  # noqa: E402
    AdaScale,
    GradientNoiseScale,
    adam_denominators,
    optimizer_square_sums,
    square_sums,
)
from tests.kernels._training import STYLES, batch_of, build, loss_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]


def cuda_batches(style: str, steps: int) -> list[dict]:
    generator = torch.Generator().manual_seed(5)
    found = [batch_of(STYLES[style], 4, generator) for _ in range(steps)]
    return [{name: tensor.cuda() for name, tensor in inputs.items()} for inputs in found]


def trained(style: str, captured: bool, **changes: object) -> list[float]:
    """Losses of 32 steps with a learning rate that changes, eagerly or as a CUDA graph."""
    data = cuda_batches(style, 32)
    model = build(replace(STYLES[style], **changes)).cuda()
    optimizer = model.optimizer(lr=2e-3)
    names = list(data[0])

    def loss_from(model: torch.nn.Module, *tensors: torch.Tensor) -> torch.Tensor:
        return loss_of(model, dict(zip(names, tensors, strict=True)))

    if captured:
        step = CapturedStep(model, optimizer, tuple(data[0].values()), loss=loss_from)
    losses = []
    for number, inputs in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 / (1 + number / 8)
        if captured:
            losses.append(step(*inputs.values()).item())
        else:
            optimizer.zero_grad()
            loss = loss_of(model, inputs)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_captured_equals_eager(style: str, checkpoint: bool) -> None:
    eager = trained(style, captured=False, checkpoint=checkpoint)
    captured = trained(style, captured=True, checkpoint=checkpoint)
    torch.testing.assert_close(captured, eager, rtol=2e-5, atol=0.0)
    assert captured[-1] < captured[0]


@pytest.mark.parametrize("style", STYLES)
def test_32_steps_equal_torch(style: str) -> None:
    ours, theirs = trained(style, captured=False), trained(style, captured=False, ops="torch")
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=0.0)


def test_a_captured_step_draws_new_dropout_each_time() -> None:
    model = build(replace(STYLES["gpt"], dropout=0.2)).cuda()
    data = tuple(cuda_batches("gpt", 1)[0].values())
    step = CapturedStep(model, model.optimizer(lr=0.0, weight_decay=0.0), data)
    losses = {step(*data).item() for _ in range(4)}
    assert len(losses) == 4


def test_what_cannot_be_captured() -> None:
    data = tuple(cuda_batches("gpt", 1)[0].values())
    model = build(STYLES["gpt"]).cuda()
    with pytest.raises(ValueError, match="capturable=True"):
        CapturedStep(model, torch.optim.AdamW(model.parameters()), data)
    model = build(replace(STYLES["gpt"], dropout=0.1, checkpoint=True)).cuda()
    with pytest.raises(ValueError, match="activation checkpointing has to save"):
        CapturedStep(model, model.optimizer(), data)
    model = build(STYLES["gpt"]).cuda()

    def waits(model: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        loss = model(*inputs)[1]
        return loss * (2.0 if loss.item() > 0 else 1.0)

    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="the step cannot be captured"):
        CapturedStep(model, model.optimizer(), data, loss=waits)
    assert torch.cuda.current_stream() == stream
    drawn = [torch.randn(4, device="cuda").tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]
    CapturedStep(model, model.optimizer(), data)(*data)


def test_the_model_of_gpt2_small_runs_in_bf16() -> None:
    tokens = torch.randint(0, 50257, (2, 1025), device="cuda")
    losses = []
    for ops in ("stoker", "torch"):
        torch.manual_seed(0)
        model = build(gpt2_small(dropout=0.0, ops=ops)).cuda().bfloat16()
        loss = model(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)


def test_statistics_do_not_wait_for_the_device() -> None:
    model = build(STYLES["gpt"]).cuda()
    optimizer = model.optimizer()
    ada = AdaScale(GradientNoiseScale(2, device="cuda"), base_batch=4)
    (inputs,) = cuda_batches("gpt", 1)
    for _ in range(2):  # once to build tables
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        groups = [group["params"] for group in optimizer.param_groups]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            small = square_sums(groups)
            square_sums(groups, adam_denominators(optimizer))
            optimizer.step()
            ada.update(2 * small, optimizer_square_sums(optimizer), small_batch=4, big_batch=8)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert 1.0 <= float(ada.gain) <= 2.0
    assert int(ada.noise.updates) == 2
