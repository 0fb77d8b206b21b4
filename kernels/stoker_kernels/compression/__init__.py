"""Gradient exchange that sends less: one interface, eleven methods, a hook for DistributedDataParallel.

    state = HookState(make_compressor("powersgd", rank=4), model.named_parameters())
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, compression_hook)

Without DDP, ``GradientExchange(compressor, TorchGroup()).average({"weight": weight.grad})`` does the same for
tensors by name. What most users need is in ``stoker_kernels`` too: :class:`Compressor`,
:func:`make_compressor`, :class:`HookState`, :func:`compression_hook`, :class:`GradientExchange`,
:class:`OneBitAdam`, and the op ``adasum``; here are the methods' classes and what simulates a group.
It pays only on slow links; ``docs/perf/compression.md`` has the bandwidth below which each method does.
"""

from __future__ import annotations

from typing import Any

from stoker_kernels.compression.chunks import Chunks
from stoker_kernels.compression.ddp_hook import HookState, compression_hook
from stoker_kernels.compression.dense import Adasum, BFloat16, Float16, NoCompression
from stoker_kernels.compression.exchange import GradientExchange, Group, TorchGroup, simulate
from stoker_kernels.compression.interface import Combine, Compressor, Message
from stoker_kernels.compression.onebit import OneBit
from stoker_kernels.compression.onebit_adam import OneBitAdam, OneBitAdamExchange
from stoker_kernels.compression.powersgd import PowerSGD
from stoker_kernels.compression.sidco import SIDCo
from stoker_kernels.compression.sparse import DGC, TopK

__all__ = (
    "COMPRESSORS",
    "DGC",
    "Adasum",
    "BFloat16",
    "Chunks",
    "Combine",
    "Compressor",
    "Float16",
    "GradientExchange",
    "Group",
    "HookState",
    "Message",
    "NoCompression",
    "OneBit",
    "OneBitAdam",
    "OneBitAdamExchange",
    "PowerSGD",
    "SIDCo",
    "TopK",
    "TorchGroup",
    "compression_hook",
    "make_compressor",
    "simulate",
)

COMPRESSORS: dict[str, type[Compressor]] = {
    kind.name: kind
    for kind in (
        NoCompression, Float16, BFloat16, TopK, DGC, SIDCo, OneBit, OneBitAdamExchange, PowerSGD,
        Chunks, Adasum,
    )
}  # fmt: skip
"""Every method by name."""


def make_compressor(name: str, **options: Any) -> Compressor:
    """Return the compressor called ``name`` with its options. Raises ``ValueError`` that lists the names."""
    if name not in COMPRESSORS:
        raise ValueError(f"no compressor {name!r}: there are {', '.join(COMPRESSORS)}")
    return COMPRESSORS[name](**options)
