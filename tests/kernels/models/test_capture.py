"""The captured step's interface, on the CPU, where it runs eagerly. ``tests/gpu`` compares the graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stoker_kernels.models.capture import CapturedStep
from tests.kernels._training import STYLES, batch_of, build, loss_of


def batches(style: str, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = [batch_of(STYLES[style], 4, generator) for _ in range(steps)]
    return [(inputs["tokens"], inputs["targets"]) for inputs in found]


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_the_step_is_the_plain_loop(style: str) -> None:
    data = batches(style, 6)
    model = build(STYLES[style])
    optimizer = model.optimizer(lr=2e-3)
    expected = []
    for number, (tokens, targets) in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 / (1 + number)
        optimizer.zero_grad()
        loss = model(tokens, targets)[1]
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    captured = build(STYLES[style])
    optimizer = captured.optimizer(lr=2e-3)
    step = CapturedStep(captured, optimizer, data[0])
    losses = []
    for number, batch in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 / (1 + number)
        loss = step(*batch)
        assert not loss.requires_grad
        losses.append(loss.item())
    assert losses == expected
    for a, b in zip(model.parameters(), captured.parameters(), strict=True):
        assert torch.equal(a, b)


def test_building_one_trains_nothing() -> None:
    model = build(STYLES["gpt"])
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = model.optimizer()
    CapturedStep(model, optimizer, batches("gpt", 1)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state


def test_any_loss_of_any_inputs() -> None:
    config = STYLES["bert"]
    model = build(config)
    inputs = batch_of(config, 4, torch.Generator().manual_seed(5))
    names = list(inputs)

    def loss(model: torch.nn.Module, *tensors: torch.Tensor) -> torch.Tensor:
        return loss_of(model, dict(zip(names, tensors, strict=True)))  # type: ignore[arg-type]

    expected = loss_of(model, inputs).item()
    step = CapturedStep(model, model.optimizer(), tuple(inputs.values()), loss=loss)
    assert step(*inputs.values()).item() == expected
    assert step(*inputs.values()).item() != expected


def test_errors() -> None:
    model = build(STYLES["gpt"])
    optimizer, (tokens, targets) = model.optimizer(), batches("gpt", 1)[0]
    with pytest.raises(TypeError, match="at least one tensor"):
        CapturedStep(model, optimizer, ())
    with pytest.raises(TypeError, match="at least one tensor"):
        CapturedStep(model, optimizer, (tokens, [1]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup must be at least 1"):
        CapturedStep(model, optimizer, (tokens, targets), warmup=0)
    with pytest.raises(ValueError, match="on one device, not on cpu, meta"):
        CapturedStep(model, optimizer, (tokens.to("meta"), targets))
    with torch.device("meta"):
        meta = build(replace(STYLES["gpt"], ops="torch"))
    with pytest.raises(ValueError, match="runs on cuda or cpu, not on meta"):
        CapturedStep(meta, meta.optimizer(), (tokens.to("meta"),))
    step = CapturedStep(model, optimizer, (tokens, targets))
    with pytest.raises(ValueError, match="takes 2 inputs, got 1"):
        step(tokens)
    with pytest.raises(
        ValueError, match=r"input 0 is \(3, 24\) torch.int64, captured was \(4, 24\)"
    ):
        step(tokens[:3], targets[:3])
    with pytest.raises(ValueError, match=r"input 1 is \(4, 24\) torch.int32"):
        step(tokens, targets.int())
