"""What every op needs around its kernel: the backend switch, the device guard, op registration.

Used by ``ops/*/autograd.py`` and the launchers in ``ops/*/triton.py``. It knows no op, and it must not
import triton at import time: CPU users may not have it.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND_VARIABLE = "STOKER_KERNELS_BACKEND"
STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Backend(StrEnum):
    """The implementation that one call runs."""

    CPU = "cpu"
    REFERENCE = "reference"
    TRITON = "triton"


def backend_for(tensor: torch.Tensor) -> Backend:
    """The implementation for ``tensor``'s device under ``STOKER_KERNELS_BACKEND``.

    Raises ``ValueError`` for an unknown setting, and ``ModuleNotFoundError`` where Triton is needed
    and absent.
    """
    choice = os.environ.get(BACKEND_VARIABLE, "auto")
    if choice == "reference":
        return Backend.REFERENCE
    if choice == "triton" or (choice == "auto" and tensor.is_cuda):
        if find_spec("triton") is None:
            raise ModuleNotFoundError(
                f"this call needs Triton, which is not installed: pip install triton, or set "
                f"{BACKEND_VARIABLE}=reference to run the slow PyTorch reference",
                name="triton",
            )
        return Backend.TRITON
    if choice == "auto":
        return Backend.CPU if tensor.device.type == "cpu" else Backend.REFERENCE
    raise ValueError(f"{BACKEND_VARIABLE}={choice!r}: expected auto, reference or triton")


def is_interpreted(kernel: Any) -> bool:
    """Whether ``kernel`` was decorated under ``TRITON_INTERPRET=1`` (fixed when its module loaded)."""
    from triton.runtime.jit import JITFunction

    return not isinstance(kernel, JITFunction)


def launch_guard(kernel: Any, tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """The context to launch ``kernel`` in: the tensor's device, not whichever is current.

    Raises ``RuntimeError`` for a CPU tensor and a compiled kernel, ``TypeError`` for a storage dtype
    that a kernel would silently narrow (float64).
    """
    if tensor.dtype not in STORAGE_DTYPES:
        raise TypeError(
            f"Triton kernels take float32, bfloat16 or float16, not {tensor.dtype}; "
            f"{BACKEND_VARIABLE}=reference runs it in PyTorch"
        )
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not is_interpreted(kernel):
        raise RuntimeError(
            f"a {tensor.device.type} tensor needs Triton's interpreter: set TRITON_INTERPRET=1 before "
            f"stoker_kernels is first used, or leave {BACKEND_VARIABLE} at auto"
        )
    return nullcontext()


def register_op(
    name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Define the opaque op ``stoker::name`` for every device and return its overload.

    The implementation picks the backend itself, so torch.compile sees one op and never its inside.
    ``fake`` returns outputs with the shapes, strides and dtypes of the real ones.
    """
    qualified = f"stoker::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", implementation)
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.stoker, name).default


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic runs in: float64 stays, everything narrower is widened to float32."""
    return torch.promote_types(dtype, torch.float32)


def dense_last_dim(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself when its last dimension has stride 1, else a contiguous copy.

    Gradients of ``.sum()`` and ``.expand()`` arrive with stride 0.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
