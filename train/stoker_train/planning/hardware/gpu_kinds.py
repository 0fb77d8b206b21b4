"""Rates of GPUs of known names, by their makers' data sheets; dense bf16 (fp16 where there is none)."""

from __future__ import annotations

import re
from dataclasses import dataclass

PRODUCTS_REACH = 0.7
"""The share of the data sheet's rate that large products reach: 0.70-0.72 were measured on an H200."""


@dataclass(frozen=True, slots=True)
class GpuKind:
    """One kind of GPU; NVLink's rate is of one direction."""

    name: str
    memory_bytes: float
    flops_per_s: float
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float = 0.0


KINDS = (
    GpuKind("B200", 180e9, 2250e12, 8.0e12, 900e9),
    GpuKind("H200", 141e9, 989e12, 4.8e12, 450e9),
    GpuKind("H100 PCIe", 80e9, 756e12, 2.0e12),
    GpuKind("H100", 80e9, 989e12, 3.35e12, 450e9),
    GpuKind("A100-SXM4-80GB", 80e9, 312e12, 2.0e12, 300e9),
    GpuKind("A100 80GB PCIe", 80e9, 312e12, 1.9e12),
    GpuKind("A100", 40e9, 312e12, 1.55e12, 300e9),
    GpuKind("L40S", 48e9, 362e12, 0.86e12),
    GpuKind("RTX 4090", 24e9, 165e12, 1.0e12),
    GpuKind("A10G", 24e9, 70e12, 0.6e12),
    GpuKind("L4", 24e9, 121e12, 0.3e12),
    GpuKind("V100", 32e9, 125e12, 0.9e12, 150e9),
    GpuKind("T4", 16e9, 65e12, 0.32e12),
)


def kind_of(name: str) -> GpuKind | None:
    """Return the kind whose name is in a device's, as in "NVIDIA H100 80GB HBM3"; None where none is."""
    wanted = _words(name)
    return next((kind for kind in KINDS if _words(kind.name) in wanted), None)


def _words(name: str) -> str:
    """Return a name's words, each between dashes: L4 is not in L40."""
    return f"-{'-'.join(re.findall('[a-z0-9]+', name.lower()))}-"
