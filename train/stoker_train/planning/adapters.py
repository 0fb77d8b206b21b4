"""Shapes of models: of our configs, of Hugging Face's, and of any ``torch.nn.Module``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from stoker_train.planning.model_shape import LayerShape, ModelShape, transformer

_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "width": (
        "moe_intermediate_size",
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "ffn_hidden_size",
    ),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
}
"""Where configs of Hugging Face have a number."""


class _Family(NamedTuple):
    """Facts of a family of Hugging Face's models that its configs do not say."""

    gated: bool
    tied: bool
    learned_positions: bool = False
    causal: bool = True


_FAMILIES = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"),
        _Family(gated=True, tied=False),
    ),
    **dict.fromkeys(("gemma", "gemma2"), _Family(gated=True, tied=True)),
    **dict.fromkeys(("gpt2", "opt"), _Family(gated=False, tied=True, learned_positions=True)),
    "bert": _Family(gated=False, tied=True, learned_positions=True, causal=False),
    "falcon": _Family(gated=False, tied=True),
    "gpt_neox": _Family(gated=False, tied=False),
}


def shape_of(model: Any) -> ModelShape:
    """Return the shape of a model, or of what a config describes.

    TypeError for anything else. Any module can be planned; only transformers whose config is known can be
    cut by tensor parallelism.
    """
    if isinstance(model, ModelShape):
        return model
    config = getattr(model, "config", None)
    found = _of_config(model) or (None if config is None else _of_config(config))
    if found is None:
        found = _of_module(model)
    if found is None:
        kind = getattr(model, "model_type", type(model).__name__)
        raise TypeError(
            f"plan_training(): model is a {kind}\n"
            "give a torch.nn.Module with layers in a ModuleList or Sequential, a config of stoker.kernels' "
            "or transformers' models, or a ModelShape"
        )
    return found


def _of_config(config: Any) -> ModelShape | None:
    if hasattr(config, "layer_count") and hasattr(config, "dim"):
        return _of_ours(config)
    if hasattr(config, "model_type") and hasattr(config, "to_dict"):
        return _of_hugging_face(config)
    return None


def _of_ours(config: Any) -> ModelShape:
    shape = transformer(
        type(config).__name__,
        layers=config.layers,
        hidden=config.dim,
        heads=config.heads,
        kv_heads=config.groups,
        width=config.width,
        gated=config.mlp == "swiglu",
        vocab=config.vocab_size,
        tied=config.tied,
        bias=config.bias,
        norm_parameters=config.norm_count,
        dropout=config.dropout > 0,
        causal=config.causal,
        max_seq_len=config.block_size,
    )
    # The config counts to the last parameter, and knows architectures that the general shape does not.
    extra = config.layer_count - shape.layers[0].parameters
    layer = replace(shape.layers[0], other_parameters=shape.layers[0].other_parameters + extra)
    layers = (layer,) * config.layers
    rest = config.parameter_count - config.layers * config.layer_count - shape.head_parameters
    return replace(shape, layers=layers, embedding_parameters=rest)


def _of_hugging_face(config: Any) -> ModelShape | None:
    name = str(config.model_type)
    family = _FAMILIES.get(name)
    if family is None:
        return None
    values: dict[str, int] = {}
    for number, keys in _KEYS.items():
        value = next((getattr(config, key) for key in keys if getattr(config, key, None)), 0)
        values[number] = int(value)
    missing = [one for one in ("layers", "hidden", "heads", "vocab") if not values[one]]
    if missing:
        known = ", ".join(_KEYS[missing[0]])
        raise ValueError(
            f"plan_training(): the config of {name} has no {missing[0]} ({known})\ngive a ModelShape"
        )
    if name == "falcon":
        several = getattr(config, "new_decoder_architecture", False)
        one = getattr(config, "multi_query", True)
        values["kv_heads"] = int(getattr(config, "num_kv_heads", 0) or 0) if several else int(one)
    dropouts = ("attention_dropout", "hidden_dropout_prob", "resid_pdrop", "dropout")
    return transformer(
        name,
        layers=values["layers"],
        hidden=values["hidden"],
        heads=values["heads"],
        kv_heads=values["kv_heads"],
        width=values["width"],
        head_dim=values["head_dim"],
        vocab=values["vocab"],
        experts=values["experts"],
        experts_per_token=values["experts_per_token"],
        max_seq_len=values["max_seq_len"],
        gated=family.gated,
        tied=bool(getattr(config, "tie_word_embeddings", family.tied)),
        bias=not family.gated and name != "falcon",
        learned_positions=values["max_seq_len"] if family.learned_positions else 0,
        norm_parameters=values["hidden"] * (1 if family.gated else 2),
        dropout=any(float(getattr(config, one, 0.0) or 0.0) > 0 for one in dropouts),
        causal=family.causal,
    )


def _of_module(model: Any) -> ModelShape | None:
    """Return the shape of a module: the blocks of its outermost lists of modules, by their parameters.

    A linear layer, an embedding's row or a norm keeps its input for the backward pass: as many values for
    each token as it is wide, and each non-linearity the same again. TypeError where there are convolutions,
    whose activations depend on what they are given.
    """
    if getattr(model, "modules", None) is None:
        return None
    blocks = _blocks_of(model)
    if not blocks:
        return None
    if any(p.ndim > 2 for p in model.parameters()):
        raise TypeError(
            f"plan_training(): {type(model).__name__} has convolutions\n"
            "their activations depend on the input: give a ModelShape whose layers have opaque_bytes, "
            "as measured for a sample"
        )
    layers = tuple(map(_layer_of, blocks))
    own = {id(p) for block in blocks for p in block.parameters()}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in own)
    hidden = max((one.input_values for one in layers), default=1)
    return ModelShape(
        name=type(model).__name__, layers=layers, hidden=hidden, embedding_parameters=rest
    )


def _blocks_of(module: Any) -> list[Any]:
    """Return the members of the outermost lists of modules: an encoder's, then a decoder's."""
    if type(module).__name__ in ("ModuleList", "Sequential") and len(module) > 0:
        return list(module)
    return [block for child in module.children() for block in _blocks_of(child)]


def _layer_of(block: Any) -> LayerShape:
    kept = widest = 0
    for module in block.modules():
        weight = getattr(module, "weight", None)
        shape: tuple[int, ...] = tuple(getattr(weight, "shape", ()))
        if len(shape) == 2:
            kept += 2 * shape[1]
            widest = widest or shape[1]
        elif len(shape) == 1:
            kept += shape[0]
    return LayerShape(
        matrix_parameters=sum(p.numel() for p in block.parameters()),
        whole_values=float(kept),
        input_values=widest or 1,
    )
