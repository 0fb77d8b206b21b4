"""The shape of a model as a planner sees it: parameters, products and activations of each layer.

Formulas: Korthikanti et al. 2022 (activations of a transformer layer, section 4), Narayanan et al. 2021
(floating-point operations, appendix).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. Counts are of the whole layer, before anything is sharded.

    ``matrix_parameters`` are those that tensor parallelism cuts; ``other_parameters`` (norms, biases of what
    is summed up) every rank keeps. ``expert_parameters`` are of all experts together, of which a token meets
    the share ``active_experts``. ``score_width`` is heads x head dimension, 0 without attention.

    Activations kept for the backward pass, in values for each token: ``whole_values`` that every rank of a
    tensor group keeps (unless sequences are cut too), ``cut_values`` that it shares; masks of dropout in
    bytes, ``whole_masks``. ``score_heads``: heads whose matrix of scores is kept (5 bytes an element in 16
    bit), 0 for fused attention. ``opaque_bytes``: bytes for each token of a layer that was measured, in
    place of all these.
    """

    matrix_parameters: int
    other_parameters: int = 0
    expert_parameters: int = 0
    active_experts: float = 1.0
    score_width: int = 0
    whole_values: float = 0.0
    cut_values: float = 0.0
    whole_masks: float = 0.0
    score_heads: int = 0
    input_values: int = 0
    opaque_bytes: float = 0.0

    @property
    def parameters(self) -> int:
        """All parameters of the layer."""
        return self.matrix_parameters + self.other_parameters + self.expert_parameters

    def flops_per_token(self, seq_len: int, *, causal: bool) -> float:
        """Return the floating-point operations of a forward pass for one token of a sequence.

        Two for each parameter in a product; 4 s w for scores and their values, of which causal masks leave
        half.
        """
        scores = 4.0 * seq_len * self.score_width * (0.5 if causal else 1.0)
        met = self.matrix_parameters + self.expert_parameters * self.active_experts
        return 2.0 * met + scores

    def score_flops_per_token(self, seq_len: int, *, causal: bool) -> float:
        """Return the part of :meth:`flops_per_token` that selective recomputation does again."""
        return 4.0 * seq_len * self.score_width * (0.5 if causal else 1.0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model: an embedding, layers in their order, a head.

    ``heads`` and ``kv_heads`` bound the tensor degree (0: there is nothing to cut). ``experts`` is the
    number of experts in a layer, 0 for a dense model. ``tied``: head and embedding share ``vocab x hidden``.
    """

    name: str
    layers: tuple[LayerShape, ...]
    hidden: int
    embedding_parameters: int = 0
    head_parameters: int = 0
    tied: bool = False
    vocab: int = 0
    heads: int = 0
    kv_heads: int = 0
    width: int = 0
    experts: int = 0
    causal: bool = True
    max_seq_len: int = 0

    @property
    def parameters(self) -> int:
        """All parameters; a tied head has none of its own."""
        layers = sum(layer.parameters for layer in self.layers)
        return layers + self.embedding_parameters + self.head_parameters

    def flops_per_token(self, seq_len: int) -> float:
        """Return the floating-point operations of a forward pass for one token, the head's included."""
        layers = sum(layer.flops_per_token(seq_len, causal=self.causal) for layer in self.layers)
        return layers + 2.0 * self.hidden * self.vocab


def transformer(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    kv_heads: int = 0,
    width: int = 0,
    head_dim: int = 0,
    gated: bool = False,
    tied: bool = True,
    learned_positions: int = 0,
    norm_parameters: int = 0,
    bias: bool = False,
    dropout: bool = True,
    fused_attention: bool = True,
    causal: bool = True,
    experts: int = 0,
    experts_per_token: int = 0,
    max_seq_len: int = 0,
) -> ModelShape:
    """Return the shape of a transformer; widths are in values, ``kv_heads`` and ``width`` 0 mean ``heads``
    and 4 hidden.

    The activations of a layer in 16 bit are s b h (34 + 5 a s / h) bytes for the classic layer (dropout,
    GELU, width 4 h, unfused attention): Korthikanti et al. 2022, equation 2. Gates, grouped heads and fused
    attention change its terms one by one.
    """
    kv_heads, width = kv_heads or heads, width or 4 * hidden
    head_dim = head_dim or hidden // heads
    wide = heads * head_dim
    qkv = wide + 2 * kv_heads * head_dim
    up = 2 * width if gated else width
    attention = hidden * qkv + wide * hidden
    mlp = hidden * up + width * hidden
    biases = (qkv + hidden + up + hidden) if bias else 0
    norms = 2 * (norm_parameters or hidden)
    # Kept: input of q, k, v; input of the MLP; inputs of both norms | q, k, v, what is projected; inside of
    # the MLP.
    active = experts_per_token if experts else 1
    inside = active * (up + width) / hidden
    layer = LayerShape(
        matrix_parameters=attention + (0 if experts else mlp) + (experts * hidden),
        other_parameters=norms + biases,
        expert_parameters=experts * mlp,
        active_experts=experts_per_token / experts if experts else 1.0,
        score_width=wide,
        whole_values=4.0 * hidden,
        cut_values=float(qkv + wide) + inside * hidden,
        whole_masks=2.0 * hidden if dropout else 0.0,
        score_heads=0 if fused_attention else heads,
        input_values=hidden,
    )
    return ModelShape(
        name=name,
        layers=(layer,) * layers,
        hidden=hidden,
        embedding_parameters=(vocab + learned_positions) * hidden,
        head_parameters=(norm_parameters or hidden) + (0 if tied else vocab * hidden),
        tied=tied,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        experts=experts,
        causal=causal,
        max_seq_len=max_seq_len,
    )
