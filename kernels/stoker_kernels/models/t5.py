"""T5 (Raffel et al. 2020): an encoder and a decoder with relative positions, by config.

Each is a stack of pre-normed layers with RMSNorm, no biases, and scores that are not scaled. One table of
position biases serves all layers of a stack. With ``tied`` the head is the embedding, and what it reads is
scaled by 1/sqrt(C).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F

from stoker_kernels.models.recompute import Recompute, run_layer
from stoker_kernels.models.transformer import (
    Seeds,
    make_adamw,
    step_seeds,
    takes_seeds,
    with_prompt,
)
from stoker_kernels.nn import (
    Attention,
    CrossAttention,
    Impl,
    LMHead,
    Ops,
    Packing,
    RelativeBias,
    RMSNorm,
)
from stoker_kernels.nn.head import IGNORE_INDEX
from stoker_kernels.ops.glu import geglu

T5Mlp = Literal["relu", "geglu"]
START = 0  # the padding token, with which a decoder's input begins


@dataclass(frozen=True, slots=True)
class T5Config:
    """The shape of a T5. The defaults are T5-small's; other fields as in ``TransformerConfig``.

    Raises ``ValueError`` for numbers below 1 and for unknown names.
    """

    vocab_size: int = 32128
    layers: int = 6  # of the encoder
    heads: int = 8
    dim: int = 512  # C
    head_dim: int = 64  # D; H x D need not be C
    hidden: int = 2048  # F
    decoder_layers: int | None = None  # None: as many as the encoder's
    mlp: T5Mlp = "relu"
    tied: bool = True
    eps: float = 1e-6
    buckets: int = 32
    max_distance: int = 128  # where the last bucket begins, in tokens
    dropout: float = 0.1
    ops: Ops | str = "stoker"
    full_logits: bool = False
    checkpoint: Recompute = False

    def __post_init__(self) -> None:
        for field in ("vocab_size", "layers", "heads", "dim", "head_dim", "hidden", "depth"):
            if getattr(self, field) < 1:
                known = "decoder_layers" if field == "depth" else field
                raise ValueError(
                    f"T5Config: {known} must be at least 1, got {getattr(self, field)}"
                )
        if self.mlp not in get_args(T5Mlp):
            raise ValueError(f"T5Config: mlp {self.mlp!r}: expected one of relu, geglu")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"T5Config: dropout must lie in [0, 1), got {self.dropout}")
        Ops.of(self.ops, "T5Config: ops")

    @property
    def switches(self) -> Ops:
        """``ops`` with every switch named."""
        return Ops.of(self.ops)

    @property
    def depth(self) -> int:
        """Layers of the decoder."""
        return self.layers if self.decoder_layers is None else self.decoder_layers

    @property
    def parameter_count(self) -> int:
        """Closed form: embeddings, two stacks with their tables and norms, an untied head."""
        c, inner = self.dim, self.heads * self.head_dim
        mlp = (3 if self.mlp == "geglu" else 2) * c * self.hidden
        encoder = self.layers * (4 * c * inner + mlp + 2 * c)
        decoder = self.depth * (8 * c * inner + mlp + 3 * c)
        rows = self.vocab_size * (1 if self.tied else 2)
        return rows * c + encoder + decoder + 2 * (self.buckets * self.heads + c)


def t5_small(**changes: Any) -> T5Config:
    """Return T5-small of 60 506 624 parameters."""
    return T5Config(**changes)


def t5_base(**changes: Any) -> T5Config:
    """Return T5-base of 222 903 552 parameters."""
    shape: dict[str, Any] = {"layers": 12, "heads": 12, "dim": 768, "hidden": 3072}
    return T5Config(**{**shape, **changes})


def t5_v1_1_small(**changes: Any) -> T5Config:
    """Return T5 1.1 small of 76 961 152 parameters: gated, untied (Shazeer 2020, arXiv 2002.05202)."""
    shape: dict[str, Any] = {
        "layers": 8, "heads": 6, "hidden": 1024, "mlp": "geglu", "tied": False,
    }  # fmt: skip
    return T5Config(**{**shape, **changes})


class T5MLP(nn.Module):
    """``down(dropout(relu(up(x))))``, or with a gate: ``up`` makes [gate | value], of gelu(gate) * value."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.gated, self.dropout = config.mlp == "geglu", config.dropout
        self.up = nn.Linear(config.dim, (2 if self.gated else 1) * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)
        self.ours = config.switches.mlp == "stoker"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x (..., C) -> (..., C)."""
        wide = self.up(x)
        if not self.gated:
            wide = F.relu(wide)
        elif self.ours:
            wide = geglu(wide)
        else:
            gate, value = wide.chunk(2, -1)
            wide = F.gelu(gate, approximate="tanh") * value
        return self.down(F.dropout(wide, self.dropout, self.training))


class T5Layer(nn.Module):
    """Self-attention, in a decoder attention to the encoder's outputs, MLP; a norm before each."""

    def __init__(
        self, config: T5Config, relative: RelativeBias, decoder: bool, first: bool
    ) -> None:
        super().__init__()
        heads: dict[str, Any] = {
            "head_dim": config.head_dim, "dropout": config.dropout, "scale": 1.0,
            "ops": config.switches.attention,
        }  # fmt: skip
        # The first layer's update is the embeddings, which have had their dropout.
        self.norm_attention = make_norm(config, 0.0 if first else config.dropout)
        self.attention = Attention(
            config.dim, config.heads, causal=decoder, relative=relative, **heads
        )
        self.norm_cross = self.cross = None
        if decoder:
            self.norm_cross = make_norm(config, config.dropout)
            self.cross = CrossAttention(config.dim, config.heads, **heads)
        self.norm_mlp = make_norm(config, config.dropout)
        self.mlp = T5MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        stream: torch.Tensor | None,
        packing: Packing | None,
        context: torch.Tensor | None,
        lengths: torch.Tensor | None,
        seeds: Seeds,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update x and stream (B, S, C), None at the start -> the next layer's x and stream.

        ``context`` (B, S_k, C) and its ``lengths`` (B,) are the encoder's, for a decoder's layer. ``seeds``
        are of the dropouts of both attentions.
        """
        if stream is None:
            y, stream = self.norm_attention(x), x
        else:
            y, stream = self.norm_attention(x, stream)
        x = self.attention(y, packing, seeds[0])
        if self.cross is not None and self.norm_cross is not None and context is not None:
            y, stream = self.norm_cross(x, stream)
            x = self.cross(y, context, lengths, seeds[1])
        y, stream = self.norm_mlp(x, stream)
        return self.mlp(y), stream


class T5Stack(nn.Module):
    """The encoder or the decoder, from embedded tokens to normalised outputs."""

    def __init__(self, config: T5Config, decoder: bool) -> None:
        super().__init__()
        self.config = config
        self._takes_seeds = takes_seeds(config.dropout, config.switches)
        self.relative = RelativeBias(
            config.heads, config.buckets, config.max_distance, bidirectional=not decoder
        )
        self.layers = nn.ModuleList(
            T5Layer(config, self.relative, decoder, first=index == 0)
            for index in range(config.depth if decoder else config.layers)
        )
        self.norm = make_norm(config, config.dropout)

    def forward(
        self,
        x: torch.Tensor,
        packing: Packing | None = None,
        context: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map x (B, S, C) -> (B, S, C); the other arguments as :class:`T5Layer`'s."""
        p = self.config.dropout
        x, stream = F.dropout(x, p, self.training), None
        dropped = self.training and self._takes_seeds
        seeds = step_seeds(x.device, 2 * len(self.layers), dropped)
        for index, layer in enumerate(self.layers):
            x, stream = run_layer(
                layer, x, stream, packing, context, lengths, seeds[2 * index : 2 * index + 2],
                recompute=self.config.checkpoint, random=p > 0 and self.training,
            )  # fmt: skip
        assert stream is not None
        return F.dropout(self.norm(x, stream)[0], p, self.training)


class T5(nn.Module):
    """Encoder and decoder with one embedding, and the head.

    Weights are drawn from torch's global generator; seed it for a repeatable start.

    >>> model = T5(t5_small())  # doctest: +SKIP
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.encoder = T5Stack(config, decoder=False)
        self.decoder = T5Stack(config, decoder=True)
        self.head = LMHead(config.dim, config.vocab_size, ops=config.switches.loss)
        if config.tied:
            self.head.weight = self.embed.weight
        # Makes vectors (P, C) before the encoder's tokens: ``models.prompt`` puts one here.
        self.prompt: nn.Module | None = None
        self.start()

    def _apply(self, fn: Any, recurse: bool = True) -> T5:
        tied = self.head.weight is self.embed.weight
        super()._apply(fn, recurse)
        if tied:  # leaving the meta device makes two parameters of the one
            self.head.weight = self.embed.weight
        return self

    @torch.no_grad()
    def start(self) -> None:
        """Draw the weights: normal of std 1/sqrt(inputs), q as if scores were scaled; norms one."""
        c, d = self.config.dim, self.config.head_dim
        inner = self.config.heads * d
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.ones_(parameter)
            elif name.startswith(("embed", "head")):
                nn.init.normal_(parameter)
            elif name.endswith("relative.weight"):
                nn.init.normal_(parameter, std=c**-0.5)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
                if name.endswith(("attention.qkv.weight", "cross.q.weight")):
                    parameter[:inner].mul_(d**-0.5)

    def encode(self, tokens: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Map tokens (B, S) int64, lengths (B,) of their real parts -> outputs (B, S, C).

        With a prompt of P vectors outputs are (B, P + S, C), and the prompt's come first.
        """
        x = self.embed(tokens)
        if self.prompt is not None:
            x = with_prompt(self.prompt, x)
        b, s, c = x.shape
        packing = None
        if lengths is not None:
            packing = Packing.padded(lengths + s - tokens.shape[1], s)
            x = x.reshape(1, b * s, c)
        outputs: torch.Tensor = self.encoder(x, packing)
        return outputs.view(b, s, c)

    def decode(
        self, tokens: torch.Tensor, context: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map tokens (B, T), the encoder's outputs (B, S, C) -> what the head reads (B, T, C).

        ``lengths`` (B,) of the outputs are real.
        """
        x: torch.Tensor = self.decoder(self.embed(tokens), None, context, lengths)
        return x * self.config.dim**-0.5 if self.config.tied else x

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Map tokens (B, S), targets (B, T) int64, lengths (B,) -> logits (B, T, V), mean loss in nats.

        ``lengths`` are of the tokens; padding is seen by none. The decoder reads the targets one place to the
        right, after the token 0. Targets of -100 are ignored. The logits are None unless
        ``config.full_logits``.
        """
        read = F.pad(targets[:, :-1], (1, 0), value=START)
        read = read.masked_fill(read == IGNORE_INDEX, START)
        context = self.encode(tokens, lengths)
        if lengths is not None:
            lengths = lengths + context.shape[1] - tokens.shape[1]
        x = self.decode(read, context, lengths)
        if not self.config.full_logits:
            return None, self.head.loss(x, targets)
        logits = self.head(x)  # (B, T, V)
        return logits, self.head.loss_of(logits, targets)

    def optimizer(
        self, lr: float = 1e-3, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.999)
    ) -> torch.optim.Optimizer:
        """Return :func:`make_adamw` of this model."""
        return make_adamw(self, self.config.switches.optimizer, lr, weight_decay, betas)


def make_norm(config: T5Config, dropout: float) -> RMSNorm:
    """Make a norm; ``dropout`` is of what it adds to the stream."""
    kind: Impl = config.switches.norm
    return RMSNorm(config.dim, config.eps, dropout=dropout, ops=kind)
