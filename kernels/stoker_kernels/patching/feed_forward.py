"""The feed-forward blocks of others: gates, and GELUs fused with the bias before them.

A layer's weight is read around its call only while the layer is exactly what its class says: an adapter, a
quantised layer or a hook put there later is called as before, and the GELU is then the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.nn.moe import swiglu_experts
from stoker_kernels.ops.bias_gelu import bias_gelu
from stoker_kernels.ops.glu import geglu, swiglu
from stoker_kernels.patching.recognition import plain
from stoker_kernels.runtime.backend import autocast_dtype

_ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.NewGELUActivation": "tanh",
    "transformers.activations.GELUTanh": "tanh",
    "transformers.activations.GELUActivation": "none",
}


def activation_of(module: Any) -> str:
    """Return "silu", or a GELU by torch's name of its approximation; "" for any other activation."""
    if type(module) is nn.GELU:
        return str(module.approximate)
    kind = type(module)
    return _ACTIVATIONS.get(f"{kind.__module__}.{kind.__qualname__}", "")


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Map gate, up (..., F) -> activation(gate) * up (..., F)."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, approximate=activation)


def _why_not(module: Any, name: str, allowed: tuple[str, ...]) -> str:
    activation = getattr(module, name)
    if activation_of(activation) in allowed:
        return ""
    return f"there is no kernel for its activation, {type(activation).__name__}"


class GLUForward:
    """``down_proj(act_fn(gate_proj(x)) * up_proj(x))`` (Llama and its kin, Gemma)."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        act = activation_of(self.act_fn)
        if not act:
            return super().forward(x)  # type: ignore[misc]
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.dtype != up.dtype:
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(gated(gate, up, act))

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why it stays, or ""."""
        return _why_not(module, "act_fn", ("silu", "tanh", "none"))


class T5GLUForward:
    """``wo(dropout(act(wi_0(x)) * wi_1(x)))`` (T5 1.1, Flan-T5)."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        act = activation_of(self.act)
        if not act:
            return super().forward(hidden_states)  # type: ignore[misc]
        gate, up = self.wi_0(hidden_states), self.wi_1(hidden_states)
        same = gate.dtype == up.dtype
        y = self.dropout(gated(gate, up, act) if same else self.act(gate) * up)
        weight = self.wo.weight
        if isinstance(weight, torch.Tensor) and weight.dtype not in (y.dtype, torch.int8):
            y = y.to(weight.dtype)
        return self.wo(y)

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why it stays, or ""."""
        return _why_not(module, "act", ("silu", "tanh", "none"))


def _wide(layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """Map x (..., C) -> the layer's result without its bias; None for a layer that must be called."""
    kind = type(layer)
    if getattr(layer, "bias", None) is None or not plain(layer, kind):
        return None
    if kind is nn.Linear or kind.__name__ == "FalconLinear":
        return F.linear(x, layer.weight)  # type: ignore[arg-type]
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return x @ layer.weight  # type: ignore[operator]
    return None


def _linear_gelu(
    x: torch.Tensor, layer: Any, act: Any, original: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Compute ``act(layer(x))`` with the bias in the GELU's kernel, or ``original(layer(x))``."""
    kind = activation_of(act)
    wide = _wide(layer, x) if kind in ("tanh", "none") else None
    return original(layer(x)) if wide is None else bias_gelu(wide, layer.bias, approximate=kind)


def _why_no_gelu(module: Any, layer: str, act: str) -> str:
    if getattr(getattr(module, layer), "bias", None) is None:
        return "there is no bias to fuse with its activation"
    return _why_not(module, act, ("tanh", "none"))


class Conv1DGELUForward:
    """``dropout(c_proj(act(c_fc(x))))`` (GPT-2)."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        y = _linear_gelu(hidden_states, self.c_fc, self.act, self.act)
        return self.dropout(self.c_proj(y))

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why it stays, or ""."""
        return _why_no_gelu(module, "c_fc", "act")


class GELUMLPForward:
    """``dense_4h_to_h(act(dense_h_to_4h(x)))`` (GPT-NeoX, Falcon)."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        y = _linear_gelu(x, self.dense_h_to_4h, self.act, self.act)
        return self.dense_4h_to_h(y)

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why it stays, or ""."""
        return _why_no_gelu(module, "dense_h_to_4h", "act")


class BertIntermediateForward:
    """``intermediate_act_fn(dense(x))`` (BERT)."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., F)."""
        act = self.intermediate_act_fn
        return _linear_gelu(hidden_states, self.dense, act, act)

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why it stays, or ""."""
        return _why_no_gelu(module, "dense", "intermediate_act_fn")


class ExpertsForward:
    """Mixtral's experts: all gates, then all second layers, as one grouped product each.

    Whatever ``experts_implementation`` the config names; experts on several ranks keep their own code.
    """

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Map tokens (T, C), their experts (T, k) and shares (T, k) -> (T, C)."""
        up, down = self.gate_up_proj, self.down_proj
        kept = self._is_expert_parallel or "DTensor" in (type(up).__name__, type(down).__name__)
        same = hidden_states.dtype == up.dtype == down.dtype
        same |= autocast_dtype(hidden_states) is not None
        if kept or not same or activation_of(self.act_fn) != "silu":
            return super().forward(hidden_states, top_k_index, top_k_weights)  # type: ignore[misc]
        return swiglu_experts(hidden_states, up, down, top_k_index, top_k_weights)

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why it stays, or ""."""
        return _why_not(module, "act_fn", ("silu",))


class SequentialForward:
    """``torch.nn.Sequential`` in which an ``nn.GELU`` follows an ``nn.Linear`` with a bias."""

    def forward(self: Any, input: Any) -> Any:
        """Run the layers in turn, each such pair as one."""
        layers = list(self)
        while layers:
            layer, rest = layers[0], layers[1:]
            if rest and type(rest[0]) is nn.GELU and plain(rest[0], nn.GELU):
                input, rest = _linear_gelu(input, layer, rest[0], rest[0]), rest[1:]
            else:
                input = layer(input)
            layers = rest
        return input

    @staticmethod
    def why_not(module: Any) -> str:
        """Return why it stays, or "-" for a sequence that has no such pair, which nobody asks about."""
        pairs = [(a, type(a) is nn.Linear, type(b) is nn.GELU) for a, b in pairwise(module)]
        fits = any(linear and gelu and a.bias is not None for a, linear, gelu in pairs)
        return "" if fits else "-"
