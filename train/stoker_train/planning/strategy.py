"""A way to train a model on many GPUs: the degrees of parallelism and what goes with them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Recompute(StrEnum):
    """The part of a layer's activations that is computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    """Scores and their softmax: much memory, few operations (Korthikanti et al. 2022, section 5)."""
    FULL = "full"
    """All but the layer's input (Chen et al. 2016)."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """Degrees and choices; ``data x tensor x pipeline`` GPUs train together.

    ``zero`` is the stage of ZeRO over the data-parallel ranks. ``sequence``: what tensor parallelism leaves
    whole is cut along the sequence. ``expert`` divides ``data``. Each data-parallel rank runs
    ``micro_batches`` of ``micro_batch`` sequences a step. ``interleave`` is the number of stages that each
    rank of a pipeline has. ``offload`` keeps optimizer states in host memory.

    Ranks are numbered with tensor parallelism innermost, then data, then pipeline; with ``pipeline_inside``
    the pipeline comes before data, so that stages are neighbours and gradients travel further.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence: bool = False
    zero: int = 0
    micro_batch: int = 1
    micro_batches: int = 1
    interleave: int = 1
    recompute: Recompute = Recompute.NONE
    offload: bool = False
    pipeline_inside: bool = False

    @property
    def data_stride(self) -> int:
        """The distance between ranks of a data-parallel group."""
        return self.tensor * (self.pipeline if self.pipeline_inside else 1)

    @property
    def pipeline_stride(self) -> int:
        """The distance between ranks of a pipeline."""
        return self.tensor * (1 if self.pipeline_inside else self.data)

    @property
    def gpus(self) -> int:
        """The GPUs that it takes."""
        return self.data * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """Sequences in a step, over all ranks."""
        return self.data * self.micro_batch * self.micro_batches

    def __str__(self) -> str:
        parts = [f"data {self.data}"]
        if self.tensor > 1:
            parts.append(f"tensor {self.tensor}{' + sequence' if self.sequence else ''}")
        if self.pipeline > 1:
            each = f" x {self.interleave}" if self.interleave > 1 else ""
            parts.append(f"pipeline {self.pipeline}{each}")
        if self.expert > 1:
            parts.append(f"expert {self.expert}")
        if self.zero:
            parts.append(f"ZeRO-{self.zero}")
        if self.recompute is not Recompute.NONE:
            parts.append(f"{self.recompute} recomputation")
        if self.offload:
            parts.append("offload")
        if self.pipeline_inside:
            parts.append("stages side by side")
        return f"{', '.join(parts)}; {self.micro_batches} x {self.micro_batch} sequences"
