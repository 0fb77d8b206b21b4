"""Falcon and T5 against Hugging Face's of the same weights: logits of tiny random models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker_kernels.models import T5, CausalLM
from tests.kernels.models.test_falcon_t5 import FALCONS, LENGTHS, T5S

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def loaded(ours: torch.nn.Module, state: dict[str, torch.Tensor]) -> torch.nn.Module:
    ours.load_state_dict(state, strict=True)
    return ours.eval()


@pytest.mark.parametrize("kind", ["7b", "rw"])
def test_falcon(kind: str) -> None:
    config = FALCONS[kind]
    theirs = transformers.FalconForCausalLM(
        transformers.FalconConfig(
            vocab_size=config.vocab_size, hidden_size=config.dim, num_hidden_layers=config.layers,
            num_attention_heads=config.heads, multi_query=config.kv_heads == 1,
            parallel_attn=config.parallel_norms == 1, new_decoder_architecture=False,
            alibi=config.position == "alibi", bias=config.bias, layer_norm_epsilon=config.eps,
        )
    ).eval()  # fmt: skip
    their: dict[str, Any] = theirs.state_dict()
    with torch.no_grad():
        for tensor in their.values():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    names = {
        "attention.qkv": "self_attention.query_key_value", "attention.out": "self_attention.dense",
        "norm_attention": "input_layernorm", "norm_mlp": "post_attention_layernorm",
        "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
    }  # fmt: skip
    ours = CausalLM(config)
    state = {}
    for name in ours.state_dict():
        if name in ("embed.weight", "head.weight"):
            state[name] = their["transformer.word_embeddings.weight"]
        elif name.startswith("norm."):
            state[name] = their[f"transformer.ln_f.{name[5:]}"]
        else:
            _, layer, rest = name.split(".", 2)
            rest = rest.replace("up_bias", "up.bias")
            part, _, leaf = rest.rpartition(".")
            value = their[f"transformer.h.{layer}.{names[part]}.{leaf}"]
            if part == "attention.qkv" and config.kv_heads is None:  # theirs: q, k, v of each head
                split = value.unflatten(0, (config.heads, 3, -1)).transpose(0, 1)
                value = split.flatten(0, 2)
            state[name] = value
    tokens = torch.randint(0, config.vocab_size, (2, 20))
    got = loaded(ours, state)(tokens)[0]
    torch.testing.assert_close(got, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_t5(kind: str) -> None:
    config = replace(T5S[kind], full_logits=True)
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=config.vocab_size, d_model=config.dim, d_kv=config.head_dim,
            d_ff=config.hidden, num_layers=config.layers, num_decoder_layers=config.depth,
            num_heads=config.heads, relative_attention_num_buckets=config.buckets,
            relative_attention_max_distance=config.max_distance, dropout_rate=0.0,
            feed_forward_proj="relu" if config.mlp == "relu" else "gated-gelu",
            tie_word_embeddings=config.tied, decoder_start_token_id=0, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    their: dict[str, Any] = theirs.state_dict()
    with torch.no_grad():
        for tensor in their.values():
            tensor.copy_(torch.randn_like(tensor) * 0.2)
        their = theirs.state_dict()  # tied ones were drawn twice: as they are now

    def joined(block: str, attention: str, parts: str) -> torch.Tensor:
        return torch.cat([their[f"{block}.{attention}.{part}.weight"] for part in parts])

    state = {"embed.weight": their["shared.weight"]}
    state["head.weight"] = their["shared.weight" if config.tied else "lm_head.weight"]
    for stack, count in (("encoder", config.layers), ("decoder", config.depth)):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        state[f"{stack}.relative.weight"] = their[f"{first}.relative_attention_bias.weight"]
        state[f"{stack}.norm.weight"] = their[f"{stack}.final_layer_norm.weight"]
        for i in range(count):
            at, block = f"{stack}.layers.{i}", f"{stack}.block.{i}.layer"
            # The stack's one table, under the name of each layer that reads it.
            state[f"{at}.attention.relative.weight"] = state[f"{stack}.relative.weight"]
            state[f"{at}.norm_attention.weight"] = their[f"{block}.0.layer_norm.weight"]
            state[f"{at}.attention.qkv.weight"] = joined(f"{block}.0", "SelfAttention", "qkv")
            state[f"{at}.attention.out.weight"] = their[f"{block}.0.SelfAttention.o.weight"]
            last = 1
            if stack == "decoder":
                last = 2
                state[f"{at}.norm_cross.weight"] = their[f"{block}.1.layer_norm.weight"]
                state[f"{at}.cross.q.weight"] = their[f"{block}.1.EncDecAttention.q.weight"]
                state[f"{at}.cross.kv.weight"] = joined(f"{block}.1", "EncDecAttention", "kv")
                state[f"{at}.cross.out.weight"] = their[f"{block}.1.EncDecAttention.o.weight"]
            state[f"{at}.norm_mlp.weight"] = their[f"{block}.{last}.layer_norm.weight"]
            dense = f"{block}.{last}.DenseReluDense"
            up = [their[f"{dense}.{name}.weight"] for name in ("wi", "wi_0", "wi_1")
                  if f"{dense}.{name}.weight" in their]  # fmt: skip
            state[f"{at}.mlp.up.weight"] = torch.cat(up)
            state[f"{at}.mlp.down.weight"] = their[f"{dense}.wo.weight"]
    tokens, targets = torch.randint(1, 61, (3, 17)), torch.randint(1, 61, (3, 9))
    mask = (torch.arange(17) < LENGTHS[:, None]).long()
    wanted = theirs(input_ids=tokens, attention_mask=mask, labels=targets)
    logits, loss = loaded(T5(config), state)(tokens, targets, LENGTHS)
    torch.testing.assert_close(logits, wanted.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loss, wanted.loss, rtol=1e-5, atol=1e-5)
