"""Training kernels for PyTorch, one folder per op, written in Triton (which emits CUDA binaries).

Why it exists: the training jobs that Stoker schedules run these kernels. Who uses it: users, through
``stoker.kernels`` or directly, and the example models in :mod:`stoker_kernels.models`.
It must not import anything of the cluster, and importing it loads neither torch nor triton:
public names resolve on first use. Nothing is launched at import.

Which implementation runs
-------------------------
One switch, the environment variable ``STOKER_KERNELS_BACKEND``, read at every call:

``auto`` (default)
    CUDA tensors run the Triton kernel, CPU tensors a fast eager PyTorch path.
``reference``
    The executable specification (``ops/<op>/reference.py``), on any device.
``triton``
    The Triton kernel on any device. CPU tensors need Triton's interpreter, so ``TRITON_INTERPRET=1``
    must have been set before the first kernel was imported; otherwise the call raises.

Triton is optional: without it the CPU path works, and a CUDA tensor raises with the remedy rather than
running slowly unannounced.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_kernels.ops.adamw import AdamW as AdamW
    from stoker_kernels.ops.attention import flash_attention as flash_attention
    from stoker_kernels.ops.cross_entropy import cross_entropy as cross_entropy
    from stoker_kernels.ops.rms_norm import RMSNorm as RMSNorm
    from stoker_kernels.ops.rms_norm import rms_norm as rms_norm

__all__ = ("AdamW", "RMSNorm", "cross_entropy", "flash_attention", "rms_norm")

_HOME = {
    "AdamW": "stoker_kernels.ops.adamw",
    "RMSNorm": "stoker_kernels.ops.rms_norm",
    "cross_entropy": "stoker_kernels.ops.cross_entropy",
    "flash_attention": "stoker_kernels.ops.attention",
    "rms_norm": "stoker_kernels.ops.rms_norm",
}


def __getattr__(name: str) -> object:
    """Import the op that ``name`` lives in, on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
