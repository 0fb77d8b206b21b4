"""What activation recomputation keeps, and runs again; that it changes no gradient is tested by model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from stoker_kernels.models import T5, recompute
from tests.kernels._training import STYLES, batch_of, build, loss_of
from tests.kernels.models.test_falcon_t5 import T5S


class Watch(TorchDispatchMode):
    """Counts ops by name, and knows which memory that they made still lives; ``known`` is not theirs."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known = {StorageWeakRef(t.untyped_storage()).cdata for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops[func.name().partition(".")[0]] += 1
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self.known:
                    self.made[reference.cdata] = (reference, storage.nbytes())
        return out

    def living_nbytes(self) -> int:
        return sum(nbytes for reference, nbytes in self.made.values() if not reference.expired())


@torch.library.custom_op("stoker_test::attention", mutates_args=())
def fused_attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Stand in for PyTorch's fused attention on a GPU: it draws its mask by itself, below autograd."""
    return F.dropout(x, dropout_p).clone()


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
    x, y = ctx.saved_tensors
    return dy * y / x, None


fused_attention.register_autograd(_backward, setup_context=_save)


def step(name: str, checkpoint: Any, ops: str) -> tuple[int, Counter[str]]:
    """Bytes that a step keeps between forward and backward, and the ops of its backward pass."""
    if name == "t5":
        torch.manual_seed(3)
        config = replace(T5S["plain"], checkpoint=checkpoint, ops=ops)
        model, tokens = T5(config), torch.arange(40).view(2, 20)
        inputs: dict[str, Any] = {"tokens": tokens, "targets": tokens}
    else:
        style = replace(STYLES[name], checkpoint=checkpoint, ops=ops)
        model = build(style)
        inputs = batch_of(style, 4, torch.Generator().manual_seed(1))
    with Watch(*model.parameters()) as forward:
        loss = loss_of(model, inputs)  # type: ignore[arg-type]
        kept = forward.living_nbytes()
    with Watch() as backward:
        loss.backward()
    return kept, backward.ops


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "t5"])
def test_selective_keeps_products_and_attention_alone(name: str) -> None:
    (everything, plain), (selective, some), (inputs, all_again) = (
        step(name, how, "stoker") for how in (False, "selective", True)
    )
    # T5 has no biases, and its relu nothing that is not an output too.
    assert inputs < selective < (0.95 if name == "t5" else 0.85) * everything
    norm = "stoker::rms_norm_fwd" if name in ("llama", "t5") else "stoker::layer_norm_fwd"
    assert plain[norm] == plain["stoker::attention_fwd"] == 0
    assert some["stoker::attention_fwd"] == 0 < all_again["stoker::attention_fwd"]
    products = [
        sum(ops[f"aten::{kind}"] for kind in ("mm", "addmm")) for ops in (plain, some, all_again)
    ]
    assert products[0] == products[1] < products[2]
    assert some[norm] == all_again[norm] > 0
    activation = {"gpt": "stoker::bias_gelu_fwd", "llama": "stoker::glu_fwd"}.get(name, norm)
    assert some[activation] == all_again[activation] > 0


def test_scores_that_are_held_are_computed_again() -> None:
    """Korthikanti's case: PyTorch's attention with a trained bias holds all probabilities."""
    everything, plain = step("t5", False, "torch")
    selective, some = step("t5", "selective", "torch")
    assert selective < 0.8 * everything
    assert some["aten::bmm"] > plain["aten::bmm"]
    assert some["aten::_softmax"] + some["aten::_safe_softmax"] > 0
    assert plain["aten::_softmax"] + plain["aten::_safe_softmax"] == 0
    assert some["aten::mm"] == plain["aten::mm"]


class DropsTwice(nn.Module):
    """Attention and a dropout after it; it draws numbers in both."""

    def __init__(self, dropout_p: float) -> None:
        super().__init__()
        self.dropout_p = dropout_p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(fused_attention(x, self.dropout_p), 0.5).sin()


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attention_that_draws_is_run_again(
    dropout_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the dropouts after it would draw other masks in the backward pass."""
    monkeypatch.setattr(recompute, "KEPT", recompute.KEPT | {"stoker_test::attention"})
    x = torch.rand(400) + 1
    gradients = []
    for how in (False, "selective"):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(5)
        out = recompute.run_layer(DropsTwice(dropout_p), leaf, recompute=how, random=True)
        with Watch() as backward:
            out.sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
        again = how == "selective" and dropout_p > 0
        assert backward.ops["stoker_test::attention"] == again
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    ("kind", "between"),
    [("flash", ()), ("flash_for_cpu", ()), ("efficient", (None, True)), ("cudnn", (None, True))],
)
def test_each_attention_of_pytorch_is_kept_unless_it_drops(
    kind: str, between: tuple[Any, ...]
) -> None:
    first, _, rest = kind.partition("_")
    name = f"_scaled_dot_product_{first}_attention" + (f"_{rest}" if rest else "")
    op, before = getattr(torch.ops.aten, name).default, (None,) * 3 + between
    keep, drop = (
        [
            recompute.keep_costly(None, op, *before, p, False),
            recompute.keep_costly(None, op, *before, dropout_p=p),
        ]
        for p in (0.0, 0.1)
    )
    assert keep == [CheckpointPolicy.MUST_SAVE] * 2
    assert recompute.keep_costly(None, op, *before) == CheckpointPolicy.MUST_SAVE
    assert drop == [CheckpointPolicy.PREFER_RECOMPUTE] * 2


def test_our_attention_is_kept_where_it_drops() -> None:
    """Its seed is an input, so running it again or not leaves the random state alone."""
    op = torch.ops.stoker.attention_fwd.default
    kept = recompute.keep_costly(None, op, *(None,) * 3, 1.0, True, 0.1)
    assert kept == CheckpointPolicy.MUST_SAVE
