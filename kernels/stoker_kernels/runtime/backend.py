"""The backend switch, the registration of ops with torch, and the checks of their arguments.

Every ``ops/*/autograd.py`` is built on it. It knows no op, and it must not import triton: CPU users may
not have it.
"""

from __future__ import annotations

import os
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from stoker_kernels.runtime.dry_run import dry_run

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND_VARIABLE = "STOKER_KERNELS_BACKEND"
HAS_TRITON = find_spec("triton") is not None  # torch.compile cannot trace the search
STORAGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Backend(StrEnum):
    """The implementation that one call runs."""

    CPU = "cpu"
    REFERENCE = "reference"
    TRITON = "triton"


def backend_for(tensor: torch.Tensor) -> Backend:
    """Return the implementation for ``tensor``'s device under ``STOKER_KERNELS_BACKEND``.

    Raises ``ValueError`` for an unknown setting, and ``ModuleNotFoundError`` where Triton is needed
    and absent.
    """
    if dry_run() is not None:
        return Backend.TRITON
    choice = os.environ.get(BACKEND_VARIABLE, "auto")
    if choice == "reference":
        return Backend.REFERENCE
    if choice == "triton" or (choice == "auto" and tensor.is_cuda):
        if not HAS_TRITON:
            raise ModuleNotFoundError(
                f"this call needs Triton, which is not installed: pip install triton, or set "
                f"{BACKEND_VARIABLE}=reference to run the slow PyTorch reference",
                name="triton",
            )
        return Backend.TRITON
    if choice == "auto":
        return Backend.CPU if tensor.device.type == "cpu" else Backend.REFERENCE
    raise ValueError(f"{BACKEND_VARIABLE}={choice!r}: expected auto, reference or triton")


def register_op(
    name: str,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
) -> Any:
    """Define the opaque op ``stoker::name`` for every device and return its overload.

    The implementation picks the backend itself, so torch.compile sees one op and never its inside.
    ``fake`` returns outputs with the shapes, strides and dtypes of the real ones. During a dry run
    the implementation runs on the fake tensors too: its launches only compile.
    """

    def fake_or_dry_run(*args: Any, **kwargs: Any) -> Any:
        return (fake if dry_run() is None else implementation)(*args, **kwargs)

    qualified = f"stoker::{name}"
    torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(qualified, "default", implementation)
    torch.library.register_fake(qualified, fake_or_dry_run)
    return getattr(torch.ops.stoker, name).default


def check_devices(op: str, x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ``ValueError`` naming an argument that is not on x's device, ``TypeError`` for a DTensor.

    Without this, one ``meta`` tensor among real ones makes the op's fake answer, with unwritten memory,
    and a DTensor ends in torch's dispatcher, which names no remedy. ``x`` is the op's first argument.
    """
    check_local(op, x=x, **others)
    for name, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device}, x on {x.device}: move one of them"
            )


def check_local(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ``TypeError`` naming an argument that is a DTensor: no op of ours has sharding rules."""
    for name, tensor in tensors.items():
        # By name: who has no DTensor need not import torch.distributed.tensor.
        if type(tensor).__name__ == "DTensor":
            raise TypeError(
                f"{op}: {name} is a DTensor, the kernels take the tensors of one process\n"
                f"call {op} within torch.distributed.tensor.experimental.local_map, which shards along "
                "any dimension but the last, or pass to_local()"
            )


def check_weight(op: str, x: torch.Tensor, weight: torch.Tensor | None, offset: float) -> None:
    """Raise unless a norm's weight (N,) fits x (..., N): ``ValueError``, or ``TypeError`` for integers."""
    if x.ndim == 0 or not x.shape[-1] or (weight is not None and weight.shape != x.shape[-1:]):
        given = None if weight is None else tuple(weight.shape)
        raise ValueError(
            f"{op}: weight must have shape (N,), N >= 1, for x (..., N), "
            f"got {given} for {tuple(x.shape)}"
        )
    if weight is None and offset:
        raise ValueError(f"{op}: offset {offset} needs a weight\npass a weight, or offset 0")
    if not (x.is_floating_point() and (weight is None or weight.is_floating_point())):
        raise TypeError(
            f"{op}: x and weight must be floating point, got {x.dtype}, "
            f"{None if weight is None else weight.dtype}"
        )


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that autocast has matrix products in on ``tensor``'s device; None outside it."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype arithmetic runs in: float64 stays, everything narrower is widened to float32."""
    return torch.promote_types(dtype, torch.float32)


def dense_last_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` itself when its last dimension has stride 1, else a contiguous copy.

    Gradients of ``.sum()`` and ``.expand()`` arrive with stride 0.
    """
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
