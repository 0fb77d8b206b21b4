"""The shape of a transformer, and the published ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from stoker_kernels.models.recompute import Recompute
from stoker_kernels.nn.switches import Ops

Norm = Literal["rms", "layer"]
Mlp = Literal["gelu", "gelu_tanh", "swiglu"]
Position = Literal["learned", "rotary", "alibi"]


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Everything that decides a model's architecture. The defaults are the small byte-level GPT.

    ``ops`` is "stoker", "torch", or an :class:`~stoker_kernels.nn.Ops` with a switch for each op.
    ``full_logits``: with targets, return the logits too; otherwise they never exist as a whole.
    ``checkpoint``: keep only each layer's input for the backward pass, and compute the rest again;
    "selective" keeps matrix products and attention's output too, and computes again what is cheap.
    Raises ``ValueError`` for numbers that do not fit together and for unknown names.
    """

    vocab_size: int = 256
    layers: int = 4
    heads: int = 4
    dim: int = 128  # C
    block_size: int = 128  # longest sequence, in tokens
    eps: float = 1e-6
    ops: Ops | str = "stoker"
    kv_heads: int | None = None  # None: as many as heads
    hidden: int | None = None  # F, the width inside the MLP; None: 4 C
    norm: Norm = "rms"
    post_norm: bool = False  # BERT: normalise after the residual sum
    mlp: Mlp = "gelu_tanh"
    position: Position = "learned"
    rotary_base: float = 10000.0
    scaled_alibi: bool = False  # Falcon: the bias is divided by sqrt(D), as the scores are
    parallel_norms: int = 0  # Falcon: MLP beside attention, from 1 norm or one each; 0: after it
    causal: bool = True
    bias: bool = False  # of the linear layers
    tied: bool = True  # the head's weight is the embedding's
    token_types: int = 0
    dropout: float = (
        0.0  # of embeddings, attention probabilities and what joins the residual stream
    )
    full_logits: bool = True
    checkpoint: Recompute = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        for field, kind in (("norm", Norm), ("mlp", Mlp), ("position", Position)):
            value = getattr(self, field)
            if value not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ValueError(f"{name}: {field} {value!r}: expected one of {known}")
        if self.checkpoint not in (False, True, "selective"):
            raise ValueError(
                f"{name}: checkpoint {self.checkpoint!r}: expected False, True or selective"
            )
        for field in ("vocab_size", "layers", "heads", "dim", "block_size", "groups", "width"):
            if getattr(self, field) < 1:
                known = {"groups": "kv_heads", "width": "hidden"}.get(field, field)
                raise ValueError(f"{name}: {known} must be at least 1, got {getattr(self, field)}")
        if self.dim % self.heads:
            raise ValueError(f"{name}: dim {self.dim} is not a multiple of heads {self.heads}")
        if self.heads % self.groups:
            raise ValueError(
                f"{name}: heads {self.heads} is not a multiple of kv_heads {self.groups}"
            )
        if self.parallel_norms not in (0, 1, 2) or (self.parallel_norms and self.post_norm):
            raise ValueError(
                f"{name}: parallel_norms must be 0, 1 or 2, and 0 with post_norm, got {self.parallel_norms}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"{name}: dropout must lie in [0, 1), got {self.dropout}")
        Ops.of(self.ops, f"{name}: ops")

    @property
    def switches(self) -> Ops:
        """``ops`` with every switch named."""
        return Ops.of(self.ops)

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        """F, the width inside the MLP."""
        return 4 * self.dim if self.hidden is None else self.hidden

    @property
    def norm_count(self) -> int:
        """Parameters of one norm."""
        return self.dim if self.norm == "rms" else 2 * self.dim

    @property
    def layer_count(self) -> int:
        """Parameters of one layer: projections C x (H + 2 G) D and C x C, the MLP, its norms."""
        c, f = self.dim, self.width
        qkv = (self.heads + 2 * self.groups) * (c // self.heads)
        up = 2 * f if self.mlp == "swiglu" else f
        biases = qkv + c + up + c if self.bias else 0
        norms = self.parallel_norms or 2
        return c * qkv + c * c + c * up + f * c + biases + norms * self.norm_count

    @property
    def parameter_count(self) -> int:
        """Closed form, without heads of BERT: embeddings, layers, one more norm, an untied head."""
        learned = self.block_size if self.position == "learned" else 0
        rows = self.vocab_size + learned + self.token_types + (0 if self.tied else self.vocab_size)
        return rows * self.dim + self.layers * self.layer_count + self.norm_count


def gpt2_small(**changes: Any) -> TransformerConfig:
    """Return GPT-2 of 124 439 808 parameters (Radford et al. 2019)."""
    shape: dict[str, Any] = {
        "vocab_size": 50257, "layers": 12, "heads": 12, "dim": 768, "block_size": 1024, "eps": 1e-5,
        "norm": "layer", "mlp": "gelu_tanh", "bias": True, "dropout": 0.1, "full_logits": False,
    }  # fmt: skip
    return TransformerConfig(**{**shape, **changes})


def bert_base(**changes: Any) -> TransformerConfig:
    """Return BERT-base, uncased: 109 482 240 parameters with the pooler (Devlin et al. 2019)."""
    shape: dict[str, Any] = {
        "vocab_size": 30522, "layers": 12, "heads": 12, "dim": 768, "block_size": 512, "eps": 1e-12,
        "norm": "layer", "post_norm": True, "mlp": "gelu", "causal": False, "bias": True,
        "token_types": 2, "dropout": 0.1, "full_logits": False,
    }  # fmt: skip
    return TransformerConfig(**{**shape, **changes})


def llama2_7b(**changes: Any) -> TransformerConfig:
    """Return LLaMA 2 of 6 738 415 616 parameters (Touvron et al. 2023)."""
    shape: dict[str, Any] = {
        "vocab_size": 32000, "layers": 32, "heads": 32, "dim": 4096, "block_size": 4096,
        "hidden": 11008, "eps": 1e-5, "mlp": "swiglu", "position": "rotary", "tied": False,
        "full_logits": False,
    }  # fmt: skip
    return TransformerConfig(**{**shape, **changes})


def llama3_8b(**changes: Any) -> TransformerConfig:
    """Return Llama 3 of 8 030 261 248 parameters (Grattafiori et al. 2024)."""
    shape: dict[str, Any] = {
        "vocab_size": 128256, "block_size": 8192, "hidden": 14336, "kv_heads": 8,
        "rotary_base": 500000.0,
    }  # fmt: skip
    return llama2_7b(**{**shape, **changes})


def falcon_7b(**changes: Any) -> TransformerConfig:
    """Return Falcon of 6 921 720 704 parameters: one key head, rotary (Almazrouei et al. 2023)."""
    shape: dict[str, Any] = {
        "vocab_size": 65024, "layers": 32, "heads": 71, "kv_heads": 1, "dim": 4544,
        "block_size": 2048, "eps": 1e-5, "norm": "layer", "mlp": "gelu", "position": "rotary",
        "parallel_norms": 1, "full_logits": False,
    }  # fmt: skip
    return TransformerConfig(**{**shape, **changes})


def falcon_40b(**changes: Any) -> TransformerConfig:
    """Return Falcon of 41 303 293 952 parameters: 8 key heads, a norm each for attention and MLP."""
    shape: dict[str, Any] = {
        "layers": 60, "heads": 128, "kv_heads": 8, "dim": 8192, "parallel_norms": 2,
    }  # fmt: skip
    return falcon_7b(**{**shape, **changes})


def falcon_rw_1b(**changes: Any) -> TransformerConfig:
    """Return Falcon-RW of 1 311 625 216 parameters: MLP after attention, ALiBi, biases."""
    shape: dict[str, Any] = {
        "vocab_size": 50304, "layers": 24, "heads": 32, "kv_heads": None, "dim": 2048,
        "position": "alibi", "scaled_alibi": True, "parallel_norms": 0, "bias": True,
    }  # fmt: skip
    return falcon_7b(**{**shape, **changes})
