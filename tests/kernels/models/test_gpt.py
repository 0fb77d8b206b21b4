"""The model: its size, its samples, and the same losses with our kernels as with torch's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stoker_kernels.models.gpt import GPT, GPTConfig

MINI = GPTConfig(layers=2, heads=2, dim=64, block_size=24)


def losses(config: GPTConfig, steps: int, batch: int = 4) -> tuple[list[float], torch.Tensor]:
    """Training losses on repeating bytes, and the first layer's weights at the end."""
    torch.set_num_threads(1)  # a model this small loses by a second one
    torch.manual_seed(3)
    model = GPT(config)
    optimizer = model.optimizer(lr=3e-3)
    generator = torch.Generator().manual_seed(5)
    history = []
    for _ in range(steps):
        start = torch.randint(0, 8, (batch, 1), generator=generator)
        tokens = (start * 3 + torch.arange(config.block_size + 1) * 7) % 64
        optimizer.zero_grad()
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return history, model.layers[0].attention.qkv.weight.detach()


def assert_same_training(ours: GPTConfig, steps: int, batch: int = 4) -> None:
    theirs = GPTConfig(
        ours.vocab_size, ours.layers, ours.heads, ours.dim, ours.block_size, ops="torch"
    )
    (a, a_weight), (b, b_weight) = losses(ours, steps, batch), losses(theirs, steps, batch)
    torch.testing.assert_close(a, b, rtol=2e-5, atol=0.0)
    # Adam turns a rounding difference in a tiny gradient into a step of the size of lr.
    assert (a_weight - b_weight).abs().mean() < 1e-4
    assert a[-1] < a[0]


def test_32_steps_equal_torch() -> None:
    assert_same_training(MINI, 32)


def test_steps_through_the_interpreted_kernels_equal_torch(interpreter: None) -> None:
    assert_same_training(GPTConfig(64, 1, 1, 32, 8), 12, batch=1)


@pytest.mark.parametrize(
    "config",
    [GPTConfig(), MINI, GPTConfig(vocab_size=100, layers=3, heads=1, dim=32, block_size=7)],
)
def test_parameter_count_is_the_closed_form(config: GPTConfig) -> None:
    assert sum(p.numel() for p in GPT(config).parameters()) == config.parameter_count


def test_the_demo_has_0_8_million_parameters() -> None:
    assert GPTConfig().parameter_count == 836_736


def test_an_untrained_model_knows_nothing() -> None:
    model = GPT(MINI)
    tokens = torch.randint(0, 256, (8, 24))
    logits, loss = model(tokens, tokens.roll(1, 1))
    assert logits.shape == (8, 24, 256)
    assert abs(loss.item() - math.log(256)) < 0.1
    assert model(tokens)[1] is None


def test_ignored_targets() -> None:
    tokens = torch.randint(0, 256, (2, 24))
    for ops in ("stoker", "torch"):
        model = GPT(GPTConfig(layers=1, heads=2, dim=64, block_size=24, ops=ops))
        half = tokens.clone()
        half[:, 12:] = -100
        _, expected = model(tokens[:, :12], tokens[:, :12])
        torch.testing.assert_close(model(tokens, half)[1], expected)


def test_generate_continues_the_prompt() -> None:
    model = GPT(MINI)
    sampled = [
        model.generate(b"ab", 30, top_k=5, generator=torch.Generator().manual_seed(7))
        for _ in range(2)
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0].startswith(b"ab")
    assert len(sampled[0]) == 32  # past block_size: the window slides
    assert model.generate(b"ab", 5, temperature=0.0) == model.generate([97, 98], 5, temperature=0.0)
    assert model.generate(b"", 3).startswith(b"\n")


def test_generate_drops_nothing() -> None:
    model = GPT(replace(MINI, dropout=0.5))
    model.layers[0].eval()
    texts = {model.generate(b"ab", 8, temperature=0.0) for _ in range(3)}
    assert len(texts) == 1
    assert model.training
    assert model.layers[1].training
    assert not model.layers[0].training
    with pytest.raises(ValueError, match="top_k at least 1"):
        model.generate(b"a", 1, top_k=0)


def test_errors() -> None:
    with pytest.raises(ValueError, match="not a multiple of heads"):
        GPTConfig(dim=100, heads=3)
    with pytest.raises(ValueError, match="expected stoker or torch"):
        GPTConfig(ops="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exceeds block_size 24"):
        GPT(MINI)(torch.zeros(1, 25).long())
    with pytest.raises(ValueError, match="at most 256"):
        GPT(GPTConfig(vocab_size=300, layers=1, heads=1, dim=32)).generate(b"a", 1)
