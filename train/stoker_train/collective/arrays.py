"""NumPy arrays and torch tensors, as the collectives take them: one view for both.

A contiguous array is shared with torch, not copied; results come back as what went in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError, WrongTypeError

if TYPE_CHECKING:
    import torch


def as_tensor(value: Any, field: str = "tensor") -> torch.Tensor:
    """Return ``value`` as a contiguous, detached tensor; it shares memory with it where that is contiguous.

    Raises WrongTypeError for what is neither a torch tensor nor a NumPy array of numbers.
    """
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise WrongTypeError(
                f"{field} has the layout {value.layout}\ngive a dense tensor: tensor.to_dense()",
                field=field,
            )
        return value.detach().contiguous()
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value).reshape(value.shape)
        if not array.flags.writeable:
            array = array.copy()
        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise WrongTypeError(
                f"{field} has the dtype {value.dtype}\n{error}", field=field
            ) from None
    raise WrongTypeError(
        f"{field} is a {type(value).__name__}\ngive a NumPy array or a torch tensor", field=field
    )


def check_writable(value: Any, field: str = "tensor") -> None:
    """Raise BadRequestError for an array that an operation in place could not fill."""
    import numpy as np

    if isinstance(value, np.ndarray) and not value.flags.writeable:
        raise BadRequestError(
            f"{field} is read-only, and the result is written to it\n"
            "arrays from stoker.get() are shared: give a copy, array.copy()",
            field=field,
        )


def write_back(value: Any, tensor: torch.Tensor) -> Any:
    """Have ``value`` hold what is in ``tensor``, made of it by :func:`as_tensor`; returns it."""
    import numpy as np
    import torch

    if not isinstance(value, torch.Tensor):
        if value.ctypes.data != tensor.data_ptr() or not value.flags.c_contiguous:
            np.copyto(value, tensor.numpy())
    elif value.data_ptr() != tensor.data_ptr() or value.stride() != tensor.stride():
        with torch.no_grad():
            value.copy_(tensor)
    return value


def like(tensor: torch.Tensor, value: Any) -> Any:
    """Return ``tensor`` as the kind of array that ``value`` is."""
    import numpy as np

    return tensor.numpy() if isinstance(value, np.ndarray) else tensor


def shape_text(tensor: torch.Tensor) -> str:
    """Return the shape as messages show it."""
    return str(tuple(tensor.shape))


def dtype_text(tensor: torch.Tensor) -> str:
    """Return the dtype as messages show it."""
    return str(tensor.dtype).removeprefix("torch.")


def device_text(*tensors: torch.Tensor) -> str:
    """Return the kinds of devices that have the tensors, as messages show them; nothing for the CPU."""
    kinds = sorted({one.device.type for one in tensors})
    return "" if kinds in ([], ["cpu"]) else " and ".join(kinds)


def signature(tensors: Sequence[torch.Tensor]) -> str:
    """Return what tells a list of tensors from another: their number, sizes and dtypes."""
    import hashlib

    each = ";".join(f"{dtype_text(one)}{shape_text(one)}" for one in tensors)
    digest = hashlib.blake2b(each.encode(), digest_size=6).hexdigest()
    return f"{len(tensors)} tensors of {sum(one.numel() for one in tensors)} values ({digest})"
