"""LoRA: an identical start, only adapters train, merging and storing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stoker_kernels.models import lora
from stoker_kernels.models.bert import Bert
from tests.kernels._training import STYLES, batch_of, build, loss_of

NAMES = ("qkv", "out", "up", "down")


def train(model: torch.nn.Module, style: str, steps: int = 5) -> list[float]:
    optimizer = model.optimizer(lr=1e-2)
    inputs = batch_of(STYLES[style], 4, torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("style", STYLES)
def test_the_start_is_identical_and_only_adapters_train(style: str) -> None:
    plain, adapted = build(STYLES[style]), build(STYLES[style])
    names = lora.inject(adapted, rank=3)
    assert len(names) == 8  # 4 in each of 2 layers
    inputs = batch_of(STYLES[style], 2, torch.Generator().manual_seed(1))
    assert torch.equal(loss_of(plain, inputs), loss_of(adapted, inputs))

    before = {name: p.detach().clone() for name, p in adapted.named_parameters()}
    losses = train(adapted, style)
    assert losses[-1] < losses[0]
    trained = {n for n, p in adapted.named_parameters() if not torch.equal(p, before[n])}
    assert trained == {f"{n}.{kind}" for n in names for kind in ("lora_a", "lora_b")}


def test_the_formula() -> None:
    linear = torch.nn.Linear(6, 5, dtype=torch.float64)
    layer = lora.LoRALinear(linear, rank=2, alpha=8.0, dropout=0.0)
    torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(3, 6, dtype=torch.float64)
    expected = linear(x) + 8.0 / 2 * x @ layer.lora_a.T @ layer.lora_b.T
    torch.testing.assert_close(layer(x), expected)
    layer.eval().merge()
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_and_back(dtype: torch.dtype) -> None:
    model = build(STYLES["llama"]).to(dtype)
    lora.inject(model, ("qkv", "down"), rank=4, dropout=0.2)
    train(model, "llama", 3)
    model.eval()
    weights = {n: m.base.weight.clone() for n, m in lora.adapters(model)}
    tokens = torch.randint(0, 61, (2, 24))
    before, _ = model(tokens)
    lora.merge(model)
    lora.merge(model)  # once is enough
    assert all(not torch.equal(m.base.weight, weights[n]) for n, m in lora.adapters(model))
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(model(tokens)[0], before, rtol=tolerance, atol=tolerance)
    lora.unmerge(model)
    assert all(torch.equal(m.base.weight, weights[n]) for n, m in lora.adapters(model))
    assert torch.equal(model(tokens)[0], before)


def test_folding_gives_the_plain_model() -> None:
    names = set(build(STYLES["gpt"]).state_dict())
    model = build(STYLES["gpt"])
    lora.inject(model)
    train(model, "gpt", 2)
    tokens = torch.randint(0, 61, (2, 24))
    before, _ = model(tokens)
    lora.fold(model)
    assert not list(lora.adapters(model))
    assert set(model.state_dict()) == names
    torch.testing.assert_close(model(tokens)[0], before, rtol=1e-4, atol=1e-4)


def test_only_adapters_are_stored() -> None:
    model = build(STYLES["bert"])
    lora.inject(model, rank=2)
    train(model, "bert", 2)
    state = lora.state_dict(model)
    linears = [m.base for _, m in lora.adapters(model)]
    assert sum(t.numel() for t in state.values()) == sum(
        2 * (m.in_features + m.out_features) for m in linears
    )
    other = build(STYLES["bert"])
    lora.inject(other, rank=2)
    lora.load_state_dict(other, state)
    inputs = batch_of(STYLES["bert"], 2, torch.Generator().manual_seed(9))
    assert torch.equal(loss_of(model, inputs), loss_of(other, inputs))


def test_dropout_only_in_training() -> None:
    model = build(STYLES["gpt"])
    lora.inject(model, dropout=0.5)
    for _, layer in lora.adapters(model):
        torch.nn.init.normal_(layer.lora_b, std=0.1)
    tokens = torch.randint(0, 61, (2, 24))
    assert not torch.equal(model(tokens)[0], model(tokens)[0])
    model.eval()
    assert torch.equal(model(tokens)[0], model(tokens)[0])


def test_adapters_follow_dtype_and_checkpointing() -> None:
    config = replace(STYLES["gpt"], checkpoint=True)
    grads = []
    for checkpoint in (True, False):
        model = build(replace(config, checkpoint=checkpoint))
        torch.manual_seed(4)
        lora.inject(model, dropout=0.0)
        for _, layer in lora.adapters(model):
            torch.nn.init.normal_(layer.lora_b, std=0.1)
        loss_of(model, batch_of(config, 2, torch.Generator().manual_seed(1))).backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
    half = build(STYLES["gpt"]).to(torch.bfloat16)
    lora.inject(half)
    assert all(layer.lora_a.dtype == torch.bfloat16 for _, layer in lora.adapters(half))


class Shared(torch.nn.Module):
    """One linear layer under two names, and one block under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = torch.nn.Linear(6, 6)
        self.first = self.second = torch.nn.ModuleDict({"up": torch.nn.Linear(6, 6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.tanh(self.up(x)))
        out: torch.Tensor = self.second["up"](torch.tanh(self.first["up"](x)))
        return out


def test_shared_layers_are_adapted_under_all_names() -> None:
    model = Shared()
    names = lora.inject(model, ("up", "down"), rank=2)
    assert sorted(names) == ["down", "first.up", "second.up", "up"]
    assert model.up is model.down
    assert isinstance(model.up, lora.LoRALinear)
    assert isinstance(model.second["up"], lora.LoRALinear)
    assert not isinstance(model.second["up"].base, lora.LoRALinear)
    assert len(list(lora.adapters(model))) == 2
    for _, layer in lora.adapters(model):
        torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(3, 6)
    before = model(x)
    before.sum().backward()
    assert all(layer.lora_a.grad.any() for _, layer in lora.adapters(model))
    lora.fold(model)
    assert type(model.up) is torch.nn.Linear
    assert model.up is model.down
    assert not any(isinstance(m, lora.LoRALinear) for m in model.modules())
    torch.testing.assert_close(model(x), before)
    with pytest.raises(ValueError, match=r"shared with 'down', which is none\nadd its last name"):
        lora.inject(Shared(), ("up",))


def test_training_while_merged_is_refused() -> None:
    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(4, 4))
    lora.inject(model, ("up",))
    lora.merge(model)
    x = torch.randn(2, 4)
    with pytest.raises(RuntimeError, match=r"merged adapter gets no gradient\ncall lora.unmerge"):
        model(x)
    with torch.no_grad():
        model(x)
    model.eval()
    model(x)
    lora.unmerge(model.train())
    model(x).sum().backward()


def test_errors() -> None:
    model = build(STYLES["gpt"])
    with pytest.raises(ValueError, match="'head' names no plain linear layer: there are down, out"):
        lora.inject(model, ("qkv", "head"))
    with pytest.raises(ValueError, match="'q_proj' names no plain"):
        lora.inject(model, ("q_proj",))
    with pytest.raises(ValueError, match="rank must be at least 1"):
        lora.inject(model, rank=0)
    assert all(p.requires_grad for p in model.parameters()), "a refused call changes nothing"
    lora.inject(model, ("qkv",), rank=2)
    with pytest.raises(ValueError, match="has adapters already"):
        lora.inject(model, ("out",))
    state = lora.state_dict(model)
    with pytest.raises(ValueError, match="1 names differ"):
        lora.load_state_dict(model, dict(list(state.items())[1:]))
    with pytest.raises(ValueError, match=r"lora_a is \(1, 64\)"):
        lora.load_state_dict(model, {n: t[:1] for n, t in state.items()})
    lora.merge(model)
    with pytest.raises(ValueError, match="call unmerge first"):
        lora.load_state_dict(model, state)


def test_bert_heads_can_stay_trainable() -> None:
    model = build(STYLES["bert"])
    assert isinstance(model, Bert)
    lora.inject(model, ("qkv",))
    model.next_sentence.requires_grad_(True)
    trained = sum(len(g["params"]) for g in model.optimizer().param_groups)
    assert trained == 2 * 2 + 2
