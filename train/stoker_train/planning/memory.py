"""GPU memory of each rank.

States: Rajbhandari et al. 2020 (ZeRO), figure 1. Activations: Korthikanti et al. 2022, table 2. In flight:
Narayanan et al. 2021, section 2.2 (1F1B: stage i of p keeps p - i micro-batches) and 2.3 (interleaved).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_train.planning.strategy import Recompute

if TYPE_CHECKING:
    from stoker_train.planning.model_shape import LayerShape, ModelShape
    from stoker_train.planning.precision import Precision
    from stoker_train.planning.strategy import Strategy

_SCORE_BYTES = 5.0
"""For an element of the scores in 16 bit: softmax's output 2, dropout's mask 1 and output 2."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def state_bytes(parameters: float, zero: int, ranks: int, precision: Precision) -> Memory:
    """Return what a rank keeps of ``parameters`` under a stage of ZeRO over ``ranks``.

    With 2 + 2 + 12 bytes: 16, 4 + 12 / N, 2 + 14 / N and 16 / N for stages 0 to 3.
    """

    def share(stage: int) -> float:
        return 1.0 / ranks if zero >= stage else 1.0

    return Memory(
        parameters=parameters * precision.weight_bytes * share(3),
        gradients=parameters * precision.gradient_bytes * share(2),
        optimizer=parameters * precision.optimizer_bytes * share(1),
        activations=0.0,
        buffers=0.0,
    )


def layer_bytes(layer: LayerShape, seq_len: int, strategy: Strategy, precision: Precision) -> float:
    """Return the activations that a layer keeps for one micro-batch, on one rank.

    The classic layer: s b h (34 + 5 a s / h); with t ranks of tensor parallelism s b h (10 + 24 / t + 5 a s
    / (h t)), with sequences cut too all of it over t; without the scores under selective recomputation; the
    input alone, 2 s b h, under full recomputation (over t with sequences cut).
    """
    tokens = seq_len * strategy.micro_batch
    t, whole = strategy.tensor, strategy.tensor if strategy.sequence else 1
    if strategy.recompute is Recompute.FULL:
        return tokens * layer.input_values * precision.value_bytes / whole
    if layer.opaque_bytes:
        return tokens * layer.opaque_bytes
    kept = layer.whole_values * precision.value_bytes + layer.whole_masks
    cut = layer.cut_values * precision.value_bytes
    scores = 0.0
    if layer.score_heads and strategy.recompute is Recompute.NONE:
        wide = _SCORE_BYTES if precision.value_bytes == 2.0 else 2.0 * precision.value_bytes + 1.0
        scores = wide * layer.score_heads * seq_len
    return tokens * (kept / whole + (cut + scores) / t)


def in_flight(stage: int, strategy: Strategy) -> float:
    """Return for how many micro-batches a stage keeps activations at most.

    1F1B: p - stage, and no more than there are. Interleaved, with v stages on each rank, it has run
    (v - 1) p + 2 (p - 1 - rank) + 1 of them forward before the first comes back, each through one of its v
    stages; in micro-batches through all its layers p + (p - 1 - 2 rank) / v.
    """
    p, m, v = strategy.pipeline, strategy.micro_batches, strategy.interleave
    if p == 1:
        return 1.0
    if v == 1:
        return float(min(p - stage, m))
    return min(p + (p - 1 - 2 * stage) / v, float(m))


def ends_bytes(model: ModelShape, stage: int, strategy: Strategy) -> float:
    """Return the parameters that the first stage has besides its layers, or the last one.

    A tied head is a second copy of the embedding where it is another rank's.
    """
    first, last = stage == 0, stage == strategy.pipeline - 1
    found = float(model.embedding_parameters) if first else 0.0
    if last:
        found += model.head_parameters
        if model.tied and not first:
            found += model.vocab * model.hidden
    return found


def head_activation_bytes(
    model: ModelShape, stage: int, seq_len: int, strategy: Strategy, precision: Precision
) -> float:
    """Return what the head keeps: its input, and the logits once in the activations' type and once in fp32.

    A fused linear and cross-entropy loss keeps less; this is the upper bound.
    """
    if stage != strategy.pipeline - 1 or not model.vocab:
        return 0.0
    tokens = seq_len * strategy.micro_batch
    values = model.hidden + model.vocab / strategy.tensor
    return tokens * (values * precision.value_bytes + 4.0 * model.vocab / strategy.tensor)
