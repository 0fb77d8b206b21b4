"""The classes that :func:`~stoker_kernels.patching.applying.apply` recognises, by their full names.

An entry names the kernel, whose forward a module gets, and the digests of the forwards that it stands for:
those of transformers 5.24, as ``recognition.digest`` makes them. For whoever adds a release,
``python -m stoker_kernels.patching`` prints those of the installed one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from stoker_kernels.ops.attention.autograd import HEAD_DIMS
from stoker_kernels.patching import (
    feed_forward,
    losses,
    norms,
    relative_attention,
    rotary_attention,
)
from stoker_kernels.patching.recognition import altered, digest, qualified

KERNELS = (
    "rms_norm", "layer_norm", "glu", "bias_gelu", "grouped_gemm", "rotary", "attention",
    "cross_entropy", "linear_cross_entropy",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One class: ``kernel`` of KERNELS, the ``mixin`` with its forward, digests of the original's."""

    kernel: str
    mixin: type | None
    digests: frozenset[str] = (
        frozenset()
    )  # empty: torch's own, whose meaning its documentation fixes
    why_not: Callable[[Any], str] = lambda module: ""
    attends: bool = False  # its attention is its config's choice


def _family(name: str, model: str, **classes: Entry) -> dict[str, Entry]:
    module = f"transformers.models.{name}.modeling_{name}."
    return {f"{module}{model}{suffix}": entry for suffix, entry in classes.items()}


def _entry(
    kernel: str, mixin: type, digests: str, *, attends: bool = False, why_not: Any = None
) -> Entry:
    why = why_not or getattr(mixin, "why_not", lambda module: "")
    return Entry(kernel, mixin, frozenset(digests.split()), why, attends)


def _no_alibi(module: Any) -> str:
    if module.config.alibi:
        return "its ALiBi is rounded to bfloat16 on purpose: exact ones would give other results"
    return ""


_LLAMA_NORM = _entry("rms_norm", norms.RMSNormForward, "c24f25cb9458")
_LLAMA_MLP = _entry("glu", feed_forward.GLUForward, "7d2027d4464e")


def _llama_attention(digests: str) -> Entry:
    return _entry("rotary", rotary_attention.LlamaAttentionForward, digests, attends=True)


def _only_attends(digests: str) -> Entry:
    return Entry("attention", None, frozenset(digests.split()), attends=True)


ENTRIES: dict[str, Entry] = {
    "torch.nn.modules.normalization.LayerNorm": Entry(
        "layer_norm", norms.LayerNormForward, why_not=norms.why_not_norm
    ),
    "torch.nn.modules.normalization.RMSNorm": Entry(
        "rms_norm", norms.TorchRMSNormForward, why_not=norms.why_not_norm
    ),
    "torch.nn.modules.container.Sequential": Entry(
        "bias_gelu", feed_forward.SequentialForward, why_not=feed_forward.SequentialForward.why_not
    ),
    "torch.nn.modules.loss.CrossEntropyLoss": Entry(
        "cross_entropy", losses.CrossEntropyForward, why_not=losses.CrossEntropyForward.why_not
    ),
    **_family(
        "llama", "Llama",
        RMSNorm=_LLAMA_NORM, MLP=_LLAMA_MLP, Attention=_llama_attention("8a137487b9c1"),
    ),
    **_family(
        "mistral", "Mistral",
        RMSNorm=_LLAMA_NORM, MLP=_LLAMA_MLP, Attention=_llama_attention("ba150f9e40fc"),
    ),
    **_family(
        "qwen2", "Qwen2",
        RMSNorm=_LLAMA_NORM, MLP=_LLAMA_MLP, Attention=_llama_attention("cffd28fd041b"),
    ),
    **_family(
        "qwen3", "Qwen3",
        RMSNorm=_LLAMA_NORM, MLP=_LLAMA_MLP, Attention=_llama_attention("4d50974537d2"),
    ),
    **_family(
        "mixtral", "Mixtral",
        RMSNorm=_LLAMA_NORM, Attention=_llama_attention("ba150f9e40fc"),
        Experts=_entry("grouped_gemm", feed_forward.ExpertsForward, "d6e174adf39a"),
    ),
    **_family(
        "gemma2", "Gemma2",
        RMSNorm=_entry("rms_norm", norms.OffsetRMSNormForward, "66f5cc5306a1"),
        MLP=_LLAMA_MLP, Attention=_llama_attention("2f4826e5d5c6"),
    ),
    **_family(
        "gpt2", "GPT2",
        MLP=_entry("bias_gelu", feed_forward.Conv1DGELUForward, "41ab05398d2a"),
        Attention=_only_attends("d5cfbad7dff0"),
    ),
    **_family(
        "gpt_neox", "GPTNeoX",
        MLP=_entry("bias_gelu", feed_forward.GELUMLPForward, "07bca05e110a"),
        Attention=_entry(
            "rotary", rotary_attention.NeoXAttentionForward, "1c1002a3108b", attends=True
        ),
    ),
    **_family(
        "bert", "Bert",
        Intermediate=_entry("bias_gelu", feed_forward.BertIntermediateForward, "ab3f9454469b"),
        SelfAttention=_only_attends("6dda2a30acb2"),
        CrossAttention=_only_attends("0a28ec5d7dbf"),
    ),
    **_family(
        "falcon", "Falcon",
        MLP=_entry("bias_gelu", feed_forward.GELUMLPForward, "62bd1c002ad7"),
        Attention=_entry(
            "rotary", rotary_attention.FalconAttentionForward, "8373ddaa1f02",
            attends=True, why_not=_no_alibi,
        ),
    ),
    **_family(
        "t5", "T5",
        LayerNorm=_entry("rms_norm", norms.RMSNormForward, "defb8f5113ef"),
        Attention=_entry(
            "attention", relative_attention.T5AttentionForward, "6a64da07e7fa", attends=True
        ),
        DenseGatedActDense=_entry("glu", feed_forward.T5GLUForward, "1c2fbd61a5a1"),
    ),
}  # fmt: skip

LEFT: dict[str, str] = {
    "transformers.models.t5.modeling_t5.T5DenseActDense": "its first layer has no bias to fuse",
    "transformers.models.falcon.modeling_falcon.FalconFlashAttention2": (
        "it calls FlashAttention itself: load the model with attn_implementation='sdpa'"
    ),
    "torch.nn.modules.activation.MultiheadAttention": "its masks may be any matrix",
}
"""Known classes that stay as they are, and why."""

CAUSAL_MODELS: dict[str, str] = {
    f"transformers.models.{name}.modeling_{name}.{kind}": why
    for name, kind, why in (
        ("llama", "LlamaForCausalLM", ""),
        ("mistral", "MistralForCausalLM", ""),
        ("qwen2", "Qwen2ForCausalLM", ""),
        ("qwen3", "Qwen3ForCausalLM", ""),
        ("mixtral", "MixtralForCausalLM", ""),
        ("gemma2", "Gemma2ForCausalLM", "its logits are capped between head and loss"),
        ("gpt2", "GPT2LMHeadModel", ""),
        ("gpt_neox", "GPTNeoXForCausalLM", ""),
        ("falcon", "FalconForCausalLM", ""),
    )
}
"""Models whose loss is ``loss_function(head(hidden), labels)``, and why not linear_cross_entropy."""

LOSS_DIGESTS = frozenset(("658c64718847",))
"""Of transformers' ForCausalLMLoss."""

INNER_LOSSES: dict[str, str] = {
    "transformers.models.bert.modeling_bert.BertForMaskedLM": "9b5ba72bf54e",
    "transformers.models.t5.modeling_t5.T5ForConditionalGeneration": "625b113ac4f1",
}
"""Models that make their loss within their forward, whose digest it is."""

_LIKE = ("RMSNorm", "LayerNorm", "Attention", "MLP", "Experts")


def find(module: nn.Module) -> tuple[Entry | None, str]:
    """Return the entry of ``module``, and why it is of no use or not there; neither for no candidate."""
    kind = type(module)
    name = qualified(kind)
    if name in LEFT:
        return None, LEFT[name]
    entry = ENTRIES.get(name)
    if entry is None:
        return None, _unknown(module)
    if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        return None, "it is not the class of that name"
    why = altered(module) or entry.why_not(module)
    if not why and entry.digests and digest(kind) not in entry.digests:
        why = "its forward is of another release of transformers, or patched by somebody"
    if not why and not entry.digests and kind.forward.__module__ != kind.__module__:
        why = "its forward has been patched by somebody"
    return entry, why


def _unknown(module: nn.Module) -> str:
    kind = type(module)
    for known in (nn.LayerNorm, nn.RMSNorm, nn.CrossEntropyLoss):
        if isinstance(module, known):
            return f"it is a subclass of {known.__name__}, not the class itself"
    for base in kind.__mro__[1:]:
        if qualified(base) in ENTRIES and base is not nn.Sequential:
            return f"it is a subclass of {base.__name__}, not the class itself"
    own = any(True for _ in module.parameters(recurse=False))
    weights = [child._parameters.get("weight") for child in module.children()]
    linear = any(weight is not None and weight.ndim > 1 for weight in weights)
    if kind.__name__.endswith(_LIKE) and (own or linear):
        return f"no kernel is known for {kind.__name__}"
    return ""


def why_no_attention(module: Any) -> str:
    """Return why an attention block cannot take our attention, or ""."""
    names = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
    size = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if size not in HEAD_DIMS:
        return f"head dimension {size}: there are {', '.join(map(str, HEAD_DIMS))}"
    return ""
