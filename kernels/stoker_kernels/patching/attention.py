"""Our attention behind transformers' ``AttentionInterface``, under the name "stoker".

A model whose config says ``attn_implementation="stoker"`` calls :func:`attend`; its masks are
:func:`~stoker_kernels.patching.masks.make_layout`'s. What our kernels do not compute raises, naming the
remedy: nothing is left out of a result unsaid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker_kernels.ops.attention import flash_attention, flash_attention_varlen
from stoker_kernels.patching.masks import REMEDY, Layout, make_layout

if TYPE_CHECKING:
    import torch

    from stoker_kernels.ops.attention.relative import RelativeBias

NAME = "stoker"


def register_attention() -> None:
    """Make ``attn_implementation="stoker"`` known to transformers, for this process. Twice is once."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_layout)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    alibi_slopes: torch.Tensor | None = None,
    relative_bias: RelativeBias | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: query (B, H, S, D), key, value (B, H_kv, S_k, D) -> (B, S, H, D), no weights.

    ``attention_mask`` is a :class:`Layout`, or None for a model without a mask: then ``is_causal``, or the
    module's attribute of that name, decides. Padded queries are zero, where they are keys too. Raises
    ``ValueError`` for what is not supported.
    """
    _refuse(others)
    layout = attention_mask
    if layout is None:
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if causal and 1 < query.shape[2] != key.shape[2]:
            raise ValueError(
                "attention 'stoker': causal queries and keys differ in number, and there is no mask\n"
                + REMEDY
            )
        layout = Layout(causal, sliding_window)
    elif not isinstance(layout, Layout):
        raise ValueError(
            f"attention 'stoker': attention_mask must be (B, S), got {tuple(layout.shape)}\n{REMEDY}"
        )
    if is_causal is not None and is_causal != layout.causal:
        raise ValueError(
            f"attention 'stoker': is_causal={is_causal} contradicts the mask\n{REMEDY}"
        )
    if sliding_window is not None and sliding_window != layout.window:
        raise ValueError(
            f"attention 'stoker': sliding_window {sliding_window}, the mask's is {layout.window}\n{REMEDY}"
        )
    if others.get("cu_seq_lens_q") is not None and not layout.packed:
        raise ValueError(
            "attention 'stoker': cu_seq_lens_q without packed position_ids\npass position_ids, and no mask"
        )
    options: dict[str, Any] = {
        "causal": layout.causal, "scale": scaling, "dropout_p": dropout, "window": layout.window,
        "softcap": softcap, "alibi_slopes": alibi_slopes,
        "relative_bias": relative_bias,
    }  # fmt: skip
    if relative_bias is not None and not layout.causal:
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                "attention 'stoker': queries and keys of relative_bias differ in number, and are not causal\n"
                + REMEDY
            )
        layout = layout.own_keys()  # distances count from the last key of a segment
    if layout.edges is None:
        return flash_attention(query, key, value, **options).transpose(1, 2), None
    edges_q, edges_k = (edge.to(query.device) for edge in layout.edges)
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # (B * S, heads, D)
    longest = (len(q), len(k)) if layout.packed else (query.shape[2], key.shape[2])
    out = flash_attention_varlen(q, k, v, edges_q, edges_k, *longest, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _refuse(others: dict[str, Any]) -> None:
    """Raise for what would change the result and is not computed."""
    for name in ("s_aux", "position_bias", "head_mask"):
        if others.get(name) is not None:
            raise ValueError(f"attention 'stoker': {name} is not supported\n{REMEDY}")
    if others.get("output_attentions"):
        raise ValueError(
            "attention 'stoker': output_attentions needs attn_implementation=\"eager\"\n"
            'use apply(model, skip={"attention"}) and set it'
        )
