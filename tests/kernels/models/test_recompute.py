"""What activation recomputation keeps, and runs again; that it changes no gradient is tested by model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from stoker_kernels.models import T5
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
