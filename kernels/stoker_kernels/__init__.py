"""Training kernels for PyTorch, one folder per op, written in Triton (which emits CUDA binaries).

The training jobs that Stoker schedules run these kernels: users call them through ``stoker.kernels`` or
directly, as do the example models in :mod:`stoker_kernels.models`. It must not import anything of the
cluster, and importing it loads neither torch nor triton: public names resolve on first use. Nothing is
launched at import.

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
    from stoker_kernels.compression import Compressor as Compressor
    from stoker_kernels.compression import GradientExchange as GradientExchange
    from stoker_kernels.compression import HookState as HookState
    from stoker_kernels.compression import OneBitAdam as OneBitAdam
    from stoker_kernels.compression import compression_hook as compression_hook
    from stoker_kernels.compression import make_compressor as make_compressor
    from stoker_kernels.measuring import least_seconds as least_seconds
    from stoker_kernels.measuring import measure_candidates as measure_candidates
    from stoker_kernels.ops.adasum import adasum as adasum
    from stoker_kernels.ops.attention import BlockMask as BlockMask
    from stoker_kernels.ops.attention import RelativeBias as RelativeBias
    from stoker_kernels.ops.attention import flash_attention as flash_attention
    from stoker_kernels.ops.attention import flash_attention_padded as flash_attention_padded
    from stoker_kernels.ops.attention import flash_attention_varlen as flash_attention_varlen
    from stoker_kernels.ops.bias_gelu import BiasGELU as BiasGELU
    from stoker_kernels.ops.bias_gelu import bias_gelu as bias_gelu
    from stoker_kernels.ops.cross_entropy import cross_entropy as cross_entropy
    from stoker_kernels.ops.gemm.fp8 import fp8_linear as fp8_linear
    from stoker_kernels.ops.gemm.fused_dense import fused_dense as fused_dense
    from stoker_kernels.ops.gemm.fused_dense import fused_glu_dense as fused_glu_dense
    from stoker_kernels.ops.gemm.grouped import grouped_gemm as grouped_gemm
    from stoker_kernels.ops.glu import GeGLU as GeGLU
    from stoker_kernels.ops.glu import SwiGLU as SwiGLU
    from stoker_kernels.ops.glu import geglu as geglu
    from stoker_kernels.ops.glu import swiglu as swiglu
    from stoker_kernels.ops.layer_norm import DropoutAddLayerNorm as DropoutAddLayerNorm
    from stoker_kernels.ops.layer_norm import LayerNorm as LayerNorm
    from stoker_kernels.ops.layer_norm import layer_norm as layer_norm
    from stoker_kernels.ops.linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
    from stoker_kernels.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from stoker_kernels.ops.rms_norm import RMSNorm as RMSNorm
    from stoker_kernels.ops.rms_norm import rms_norm as rms_norm
    from stoker_kernels.ops.rotary import Llama3Scaling as Llama3Scaling
    from stoker_kernels.ops.rotary import YarnScaling as YarnScaling
    from stoker_kernels.ops.rotary import rotary as rotary
    from stoker_kernels.ops.rotary import rotary_tables as rotary_tables
    from stoker_kernels.ops.scan import prefix_sum as prefix_sum
    from stoker_kernels.ops.scan import radix_sort as radix_sort
    from stoker_kernels.ops.softmax import softmax as softmax
    from stoker_kernels.optim import KFAC as KFAC
    from stoker_kernels.optim import LAMB as LAMB
    from stoker_kernels.optim import LARS as LARS
    from stoker_kernels.optim import SGD as SGD
    from stoker_kernels.optim import Adadelta as Adadelta
    from stoker_kernels.optim import Adagrad as Adagrad
    from stoker_kernels.optim import Adam as Adam
    from stoker_kernels.optim import AdamW as AdamW
    from stoker_kernels.optim import InBackward as InBackward
    from stoker_kernels.optim import RMSprop as RMSprop
    from stoker_kernels.patching import Applied as Applied
    from stoker_kernels.patching import apply as apply
    from stoker_kernels.patching import register_attention as register_attention
    from stoker_kernels.primitives import philox as philox

# Public names by the module that defines them. The imports above say the same to type checkers, which do not
# evaluate a table; a test compares the two.
_NAMES = {
    "compression": (
        "Compressor",
        "GradientExchange",
        "HookState",
        "OneBitAdam",
        "compression_hook",
        "make_compressor",
    ),
    "measuring": ("least_seconds", "measure_candidates"),
    "ops.adasum": ("adasum",),
    "ops.attention": (
        "BlockMask",
        "RelativeBias",
        "flash_attention",
        "flash_attention_padded",
        "flash_attention_varlen",
    ),
    "ops.bias_gelu": ("BiasGELU", "bias_gelu"),
    "ops.cross_entropy": ("cross_entropy",),
    "ops.gemm.fused_dense": ("fused_dense", "fused_glu_dense"),
    "ops.gemm.fp8": ("fp8_linear",),
    "ops.gemm.grouped": ("grouped_gemm",),
    "ops.glu": ("GeGLU", "SwiGLU", "geglu", "swiglu"),
    "ops.layer_norm": ("DropoutAddLayerNorm", "LayerNorm", "layer_norm"),
    "ops.linear_cross_entropy": ("LinearCrossEntropy", "linear_cross_entropy"),
    "ops.rms_norm": ("RMSNorm", "rms_norm"),
    "ops.rotary": ("Llama3Scaling", "YarnScaling", "rotary", "rotary_tables"),
    "ops.scan": ("prefix_sum", "radix_sort"),
    "ops.softmax": ("softmax",),
    "optim": (
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "InBackward",
        "KFAC",
        "LAMB",
        "LARS",
        "RMSprop",
        "SGD",
    ),
    "patching": ("Applied", "apply", "register_attention"),
}
_PACKAGES = (
    "aot",
    "compression",
    "models",
    "nn",
    "optim",
    "patching",
    "statistics",
    "tuning",
    "workloads",
)
_MODULES = {**{name: name for name in _PACKAGES}, "philox": "primitives.philox"}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
if not TYPE_CHECKING:  # a checker takes the imports above for it, and understands literals alone
    __all__ = tuple(sorted(_HOME))


def __getattr__(name: str) -> object:
    """Import the public module ``name``, or the module that defines the public name, on first use."""
    if name in _MODULES:
        return import_module(f"stoker_kernels.{_MODULES[name]}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"stoker_kernels.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
