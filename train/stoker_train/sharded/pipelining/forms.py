"""The form of what passes from one stage of a pipeline to the next: how many tensors, and which.

Read by the executor: a stage tells the next one the form once, as numbers, and checks what follows by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from stoker.exceptions import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ITEMS = 8
MAX_DIMS = 8
NUMBERS = 1 + MAX_ITEMS * (3 + MAX_DIMS)
"""The length of a form as numbers, so that the reader knows how much to read."""
_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip

Tensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Form:
    """The tensors of a message, in order; None where the stage returned None."""

    items: tuple[Item | None, ...]

    @classmethod
    def of(cls, tensors: Tensors) -> Form:
        """Return the form of these tensors."""
        return cls(
            tuple(
                None if one is None else Item(tuple(one.shape), one.dtype, one.requires_grad)
                for one in tensors
            )
        )

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> Form:
        """Return the form that :meth:`encode` made numbers of."""
        items: list[Item | None] = []
        for place in range(numbers[0]):
            dims, dtype, gradient, *shape = numbers[1 + place * (3 + MAX_DIMS) :][: 3 + MAX_DIMS]
            item = None if dims < 0 else Item(tuple(shape[:dims]), _DTYPES[dtype], bool(gradient))
            items.append(item)
        return cls(tuple(items))

    def encode(self) -> list[int]:
        """Return the form as ``NUMBERS`` integers. Raises BadRequestError for what does not fit in them."""
        if len(self.items) > MAX_ITEMS:
            raise BadRequestError(
                f"a stage returned {len(self.items)} values\nat most {MAX_ITEMS} can pass to the next stage"
            )
        numbers = [len(self.items)]
        for item in self.items:
            if item is None:
                numbers += [-1] + [0] * (2 + MAX_DIMS)
                continue
            if len(item.shape) > MAX_DIMS or item.dtype not in _DTYPES:
                raise BadRequestError(
                    f"a stage returned {item}, which cannot pass to the next stage\n"
                    f"tensors have at most {MAX_DIMS} dimensions, and real numbers"
                )
            padding = [0] * (MAX_DIMS - len(item.shape))
            numbers += [len(item.shape), _DTYPES.index(item.dtype), int(item.has_gradient)]
            numbers += [*item.shape, *padding]
        return numbers + [0] * (NUMBERS - len(numbers))

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Return tensors to read a message of this form into."""
        return [
            torch.empty(item.shape, dtype=item.dtype, device=device) for item in self.items if item
        ]

    def gradients(self) -> Form:
        """Return the form of the gradients of such a message."""
        return Form(tuple(item for item in self.items if item and item.has_gradient))

    def filled(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """Return what the stage returned, of tensors that came; those with gradients as leaves."""
        coming = iter(tensors)
        return tuple(
            None if item is None else next(coming).requires_grad_(item.has_gradient)
            for item in self.items
        )

    def __str__(self) -> str:
        return ", ".join("None" if item is None else str(item) for item in self.items)


def outputs_of(value: Any, stage: int) -> Tensors:
    """Return what a stage returned as a tuple. Raises BadRequestError for anything but tensors and None."""
    found = tuple(value) if isinstance(value, tuple | list) else (value,)
    for one in found:
        if isinstance(one, DTensor):
            raise BadRequestError(
                f"stage {stage} returned a DTensor\n"
                "let the plan of tensor parallelism give local tensors out of the last layer of a stage"
            )
        if one is not None and not isinstance(one, torch.Tensor):
            raise BadRequestError(
                f"stage {stage} returned a {type(one).__name__}\n"
                "what passes to the next stage is a tensor, or a tuple of tensors and None"
            )
    return found
