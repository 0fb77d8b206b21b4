"""Tiny random models of the families that ``apply`` knows, and batches for them. No network, no weights."""

from __future__ import annotations

import copy
import os
from importlib import import_module
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB, HIDDEN, SEQ, BATCH = 96, 64, 12, 3
_COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_COMMON, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 64,
}  # fmt: skip
_GPT = {**_COMMON, "n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": 64}
_NEOX = {
    **_COMMON, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "rotary_pct": 0.25,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", _LLAMA),
    "mistral": ("Mistral", "ForCausalLM", {**_LLAMA, "sliding_window": 5}),
    "qwen2": (
        "Qwen2", "ForCausalLM",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", "ForCausalLM", _LLAMA),
    "mixtral": ("Mixtral", "ForCausalLM", {**_LLAMA, "num_local_experts": 3}),
    "gemma2": ("Gemma2", "ForCausalLM", {**_LLAMA, "sliding_window": 5, "query_pre_attn_scalar": 32}),
    "gpt2": ("GPT2", "LMHeadModel", {**_GPT, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoX", "ForCausalLM", _NEOX),
    "falcon": (
        "Falcon", "ForCausalLM",
        {
            **_COMMON, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2,
            "bias": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        },
    ),
    "bert": (
        "Bert", "ForMaskedLM",
        {
            **_COMMON, "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "t5": (
        "T5", "ForConditionalGeneration",
        {
            "vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2,
            "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
        },
    ),
}  # fmt: skip


def build(family: str, seed: int = 0, **changes: Any) -> torch.nn.Module:
    """Build the family's model with weights of ``seed``: wider than usual, so that every part shows."""
    name, suffix, settings = FAMILIES[family]
    module = import_module(f"transformers.models.{family}")
    config = getattr(module, f"{name}Config")(**copy.deepcopy(settings) | changes)
    torch.manual_seed(seed)
    model = getattr(module, f"{name}{suffix}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def batch(padding: str, seed: int = 0, *, causal: bool = True) -> dict[str, torch.Tensor]:
    """Make token ids, a mask and labels (3, 12), with rows padded "left", "right", or not ("none")."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (BATCH, SEQ), generator=generator)
    mask = torch.ones_like(ids)
    if padding != "none":
        for row, pad in enumerate((0, 3, 7)):
            where = slice(0, pad) if padding == "left" else slice(SEQ - pad, SEQ)
            mask[row, where] = 0
    ids = ids.masked_fill(mask == 0, 0)
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 3] = -100
    if padding == "left" and causal:
        # Predicted by padding, of which transformers' own attentions make different things.
        first = mask.argmax(1)
        labels[torch.arange(BATCH), first] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one step."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of two models' gradients."""
    assert ours.keys() == theirs.keys()
    return max((ours[n] - theirs[n]).abs().max().item() for n in ours)
