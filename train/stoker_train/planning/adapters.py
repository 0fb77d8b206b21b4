"""Shapes of models: of our configs, of Hugging Face's, and of any ``torch.nn.Module``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stoker_train.planning.model_shape import LayerShape, ModelShape, transformer

_HUGGING_FACE = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "width": ("intermediate_size", "n_inner", "d_ff"),
    "vocab": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
}
_GATED_FAMILIES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2"})


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
        raise TypeError(
            f"plan_training(): model is a {type(model).__name__}\n"
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


def _of_hugging_face(config: Any) -> ModelShape:
    values: dict[str, int] = {}
    for name, keys in _HUGGING_FACE.items():
        value = next((getattr(config, key) for key in keys if getattr(config, key, None)), 0)
        values[name] = int(value)
    missing = [name for name in ("layers", "hidden", "heads", "vocab") if not values[name]]
    if missing:
        known = ", ".join(_HUGGING_FACE[missing[0]])
        raise ValueError(
            f"plan_training(): the config of {config.model_type} has no {missing[0]} ({known})\n"
            "give a ModelShape"
        )
    family = str(config.model_type)
    gated = family in _GATED_FAMILIES or bool(getattr(config, "is_gated_act", False))
    rotary = hasattr(config, "rope_theta") or hasattr(config, "rope_parameters")
    return transformer(
        family,
        layers=values["layers"],
        hidden=values["hidden"],
        heads=values["heads"],
        kv_heads=values["kv_heads"],
        width=values["width"],
        vocab=values["vocab"],
        experts=values["experts"],
        experts_per_token=values["experts_per_token"],
        max_seq_len=values["max_seq_len"],
        gated=gated,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        bias=not gated,
        learned_positions=0 if rotary else values["max_seq_len"],
        norm_parameters=values["hidden"] * (1 if gated else 2),
        dropout=float(getattr(config, "attention_dropout", 0.0) or 0.0) > 0,
    )


def _of_module(model: Any) -> ModelShape | None:
    """Return the shape of a module: the blocks of its longest list of modules, by their parameters.

    A linear layer, an embedding's row or a norm keeps its input for the backward pass: as many values for
    each token as it is wide, and each non-linearity the same again.
    """
    blocks = _blocks_of(model)
    if blocks is None:
        return None
    layers = tuple(map(_layer_of, blocks))
    own = {id(p) for block in blocks for p in block.parameters()}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in own)
    hidden = max((one.input_values for one in layers), default=1)
    return ModelShape(
        name=type(model).__name__, layers=layers, hidden=hidden, embedding_parameters=rest
    )


def _blocks_of(model: Any) -> list[Any] | None:
    modules = getattr(model, "modules", None)
    if modules is None:
        return None
    lists = [
        list(module)
        for module in modules()
        if type(module).__name__ in ("ModuleList", "Sequential") and len(module) > 0
    ]
    return max(lists, key=len, default=None)


def _layer_of(block: Any) -> LayerShape:
    kept = widest = 0
    for module in block.modules():
        weight = getattr(module, "weight", None)
        shape: tuple[int, ...] = tuple(getattr(weight, "shape", ()))
        if len(shape) >= 2:
            kept += 2 * shape[1]
            widest = widest or shape[1]
        elif len(shape) == 1:
            kept += shape[0]
    return LayerShape(
        matrix_parameters=sum(p.numel() for p in block.parameters()),
        whole_values=float(kept),
        input_values=widest or 1,
    )
