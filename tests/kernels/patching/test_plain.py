"""``apply`` on modules of torch's own: exactly the same function, or left as they are with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels import apply
from stoker_kernels.patching.swapping import mixin_of


class Net(nn.Module):
    """Each plain module that has a kernel, beside some that do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rms = nn.LayerNorm(16), nn.RMSNorm(16)
        self.unbiased = nn.LayerNorm(16, bias=False)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 16))
        self.tanh = nn.Sequential(nn.Linear(16, 16), nn.GELU(approximate="tanh"))
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.tanh(self.unbiased(x + self.mlp(self.norm(x))))
        return self.loss(self.rms(y), target)


def gradients(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    loss = model(x, target)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr, list-item]


@pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight"
)  # torch's own norm says so
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_modules_are_the_same_functions(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    theirs = Net().to(dtype)
    ours = copy.deepcopy(theirs)
    applied = apply(ours, strict=True)
    assert set(applied.replaced) == {"norm", "rms", "unbiased", "mlp", "tanh", "loss"}
    x, target = torch.randn(6, 16, dtype=dtype), torch.randint(16, (6,))
    for mine, other in zip(gradients(ours, x, target), gradients(theirs, x, target), strict=True):
        assert mine.dtype == other.dtype
        atol = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(mine, other, atol=atol, rtol=1e-4 if atol < 0.01 else 0.05)
    with torch.autocast("cpu", torch.bfloat16):
        mine, other = (m(x.float(), target) for m in (ours.float(), theirs.float()))
    assert mine.dtype == other.dtype
    assert mine.item() == pytest.approx(other.item(), abs=0.05)


def test_other_inputs_take_the_old_way() -> None:
    loss = nn.CrossEntropyLoss()
    apply(loss)
    logits, soft = torch.randn(4, 5), torch.randn(4, 5).softmax(-1)
    assert torch.equal(loss(logits, soft), F.cross_entropy(logits, soft))
    images, classes = torch.randn(2, 5, 3), torch.randint(5, (2, 3))
    assert torch.equal(loss(images, classes), F.cross_entropy(images, classes))
    norm = nn.LayerNorm(8)
    apply(norm)
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(norm.double()(x), F.layer_norm(x, (8,), norm.weight, norm.bias))


class MyNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class MyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)


def left_of(module: nn.Module) -> str:
    whole = nn.ModuleDict({"part": module})
    before = type(module)
    applied = apply(whole)
    assert not applied.replaced
    assert type(module) is before
    with pytest.raises(ValueError, match="1 modules stay as they are"):
        apply(whole, strict=True)
    return applied.left["part"]


def test_what_is_not_exactly_known_is_left_with_the_reason() -> None:
    assert "subclass of LayerNorm" in left_of(MyNorm(4))
    assert "no weight" in left_of(nn.LayerNorm(4, elementwise_affine=False))
    assert "several dimensions" in left_of(nn.LayerNorm((2, 4)))
    assert "classes have weights" in left_of(nn.CrossEntropyLoss(weight=torch.ones(3)))
    assert "no kernel is known for MyAttention" in left_of(MyAttention())
    assert "any matrix" in left_of(nn.MultiheadAttention(8, 2))
    hooked: Any = nn.LayerNorm(4)
    hooked.register_forward_hook(lambda *_: None)
    assert "it has hooks" in left_of(hooked)
    replaced = nn.LayerNorm(4)
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    assert "on this very module" in left_of(replaced)


def test_a_class_patched_by_another_library_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, input: input)
    assert "patched by somebody" in left_of(nn.LayerNorm(4))


def test_only_and_skip_take_kernels_and_names() -> None:
    assert set(apply(Net(), only=["layer_norm"]).replaced) == {"norm", "unbiased"}
    assert set(apply(Net(), only=["m*"]).replaced) == {"mlp"}
    applied = apply(Net(), skip=["layer_norm", "mlp"])
    assert set(applied.replaced) == {"rms", "tanh", "loss"}
    assert applied.left["norm"] == "layer_norm: not chosen"
    with pytest.raises(
        ValueError, match="'attentoin' is neither a kernel nor the name of a module"
    ):
        apply(Net(), skip=["attentoin"])


def test_the_table_counts_classes() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4), nn.LayerNorm((2, 2)))
    assert str(apply(model)).splitlines() == [
        "modules  class      kernels",
        "      2  LayerNorm  layer_norm",
        "      1  LayerNorm  left: it normalises several dimensions",
    ]


def test_a_layer_that_is_adapted_later_is_called() -> None:
    """What the fused GELU reads must never bypass what somebody has put in the layer's place."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU())
    apply(model)
    assert mixin_of(model) is not None
    x = torch.randn(2, 4)
    calls = []
    handle = model[0].register_forward_hook(lambda module, args, y: calls.append(1))
    assert torch.equal(model(x), F.gelu(F.linear(x, model[0].weight, model[0].bias)))
    assert calls
    handle.remove()
    model[0] = nn.Sequential(model[0], nn.Tanh())
    assert torch.equal(model(x), F.gelu(model[0](x)))
