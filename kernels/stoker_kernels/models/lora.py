"""LoRA: small trained adapters beside frozen linear layers (Hu et al. 2021).

    y = x W^T + bias + (alpha / rank) * dropout(x) A^T B^T,  A (rank, in) random, B (out, rank) zero

B starts at zero, so an adapted model starts as the very function it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.models.adapter_state import take_over

TARGETS = ("qkv", "out", "up", "down")


class LoRALinear(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.scale, self.dropout = alpha / rank, dropout
        weight = base.weight
        self.lora_a = nn.Parameter(weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self._unmerged: torch.Tensor | None = None

    @property
    def merged(self) -> bool:
        """Whether the base weight holds the adapter's part now."""
        return self._unmerged is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., in) -> (..., out). Raises ``RuntimeError`` in training while it is merged."""
        if self.merged and self.training and torch.is_grad_enabled() and self.lora_a.requires_grad:
            raise RuntimeError(
                "LoRALinear: a merged adapter gets no gradient\ncall lora.unmerge(model) before training, "
                "model.eval() or torch.no_grad() for inference"
            )
        y = self.base(x)
        if self.merged:
            return y
        low = F.linear(F.dropout(x, self.dropout, self.training), self.lora_a)  # (..., rank)
        return y + F.linear(low, self.lora_b) * self.scale

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapter to the base weight, in at least fp32, rounded once; keeps a copy to return to."""
        if self.merged:
            return
        weight = self.base.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._unmerged = weight.detach().clone()
        weight.copy_(
            torch.addmm(
                weight.to(wide), self.lora_b.to(wide), self.lora_a.to(wide), alpha=self.scale
            )
        )

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put the base weight back, bit for bit: subtracting would leave rounding errors in it."""
        if self._unmerged is not None:
            self.base.weight.copy_(self._unmerged)
            self._unmerged = None

    def extra_repr(self) -> str:
        return f"rank={self.lora_a.shape[0]}, scale={self.scale}, merged={self.merged}"


def inject(
    model: nn.Module,
    targets: Iterable[str] = TARGETS,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
) -> list[str]:
    """Freeze ``model`` and adapt its linear layers whose last name is in ``targets``; returns their names.

    A layer used under several names gets one adapter, under all of them; all must be in ``targets``. Make the
    optimizer afterwards: it takes the parameters that train. Raises ``ValueError`` for a target that names
    no plain linear layer (a head with a loss, or one tied to the embedding, is none), for a shared layer of
    which another name is no target, for a model that has adapters, and for a rank below 1.
    """
    if rank < 1:
        raise ValueError(f"lora.inject: rank must be at least 1, got {rank}")
    if next(adapters(model), None) is not None:
        raise ValueError("lora.inject: the model has adapters already")
    targets = tuple(targets)
    modules = dict(model.named_modules(remove_duplicate=False))
    targeted = {n: m for n, m in modules.items() if n.rpartition(".")[2] in targets}
    for target in targets:
        named = [m for n, m in targeted.items() if n.rpartition(".")[2] == target]
        if not named or any(type(m) is not nn.Linear for m in named):
            names = sorted(
                {n.rpartition(".")[2] for n, m in modules.items() if type(m) is nn.Linear}
            )
            raise ValueError(
                f"lora.inject: {target!r} names no plain linear layer: there are {', '.join(names)}"
            )
    chosen = {id(m) for m in targeted.values()}
    for name, module in modules.items():
        if id(module) in chosen and name not in targeted:
            raise ValueError(
                f"lora.inject: a target is shared with {name!r}, which is none\nadd its last name to targets"
            )
    model.requires_grad_(False)
    adapted: dict[int, LoRALinear] = {}
    for name, linear in targeted.items():
        assert isinstance(linear, nn.Linear)
        if id(linear) not in adapted:
            adapted[id(linear)] = LoRALinear(linear, rank, alpha, dropout)
        # Modules may be shared too: then one assignment reaches the layer under several names.
        _replace(model, name, adapted[id(linear)])
    return list(targeted)


def adapters(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Return every adapted layer of ``model``, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def merge(model: nn.Module) -> None:
    """Fold the adapters into the weights, for inference at no extra cost; :func:`unmerge` undoes it."""
    for _, layer in adapters(model):
        layer.merge()


def unmerge(model: nn.Module) -> None:
    """Undo :func:`merge`: the frozen weights are what they were, bit for bit."""
    for _, layer in adapters(model):
        layer.unmerge()


def fold(model: nn.Module) -> None:
    """Merge for good: plain linear layers again, under their old names. They stay frozen."""
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, LoRALinear):
            layer.merge()
            _replace(model, name, layer.base)


def state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the adapters' tensors alone, by name: what a fine-tuning run has to store."""
    return {
        f"{name}.{kind}": getattr(layer, kind).detach()
        for name, layer in adapters(model)
        for kind in ("lora_a", "lora_b")
    }


def load_state_dict(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Take over what :func:`state_dict` returned.

    Raises ``ValueError`` where names or shapes differ, or while the model is merged.
    """
    if any(layer.merged for _, layer in adapters(model)):
        raise ValueError("lora.load_state_dict: the model is merged: call unmerge first")
    take_over(state_dict(model), state, "lora.load_state_dict")


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
