"""Finds reads of memory that nobody has written: behind the operands of matrix products.

A vectorised product (oneDNN's AMX code, for one) reads what lies between the rows of a strided operand
and multiplies it by zero. Zero times NaN is NaN, so what memory held before decides. Only some CPUs show
it; here every CPU does, because ``torch.utils.deterministic.fill_uninitialized_memory`` fills new
memory with NaN, and the storage behind each operand is looked at.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "linear",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "_addmm_activation",
        "mkldnn_linear",
        "_scaled_dot_product_flash_attention_for_cpu",
        "convolution",
    ]
)


def unwritten_behind(tensor: torch.Tensor) -> bool:
    """Whether the storage of an all-finite tensor holds values that are not finite."""
    if not tensor.is_floating_point() or tensor.device.type != "cpu" or not tensor.numel():
        return False
    tensor = tensor.detach()
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (len(storage) // tensor.itemsize,))
    return not whole.isfinite().all().item() and bool(tensor.isfinite().all().item())


def _check(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
    operands = {key: value for key, value in kwargs.items() if key != "out"}
    for operand in tree_leaves((args, operands)):
        if isinstance(operand, torch.Tensor) and unwritten_behind(operand):
            raise AssertionError(
                f"{func} reads an operand of shape {tuple(operand.shape)}, strides {operand.stride()} "
                f"and dtype {operand.dtype} whose storage holds values that were never written"
            )


def _implementation(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """The Python code behind an op of ours, as ``register_op`` got it."""
    entry = torch._library.simple_registry.singleton.find(op.name().removesuffix(".default"))
    inside = {"func": entry.fake_impl.kernel.func}
    while "implementation" not in inside:  # PyTorch wraps what it is given
        inside = inspect.getclosurevars(inside["func"]).nonlocals
    return inside["implementation"]


class ProductsReadWrittenMemory(TorchDispatchMode):
    """Within it, a product of matrices whose operands lie beside unwritten memory is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        """How many were looked at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "stoker":
            with self:  # an op is opaque to a mode, but for this
                return _implementation(func)(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            self.products += 1
            _check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
