"""Tensors whose elements lie further apart than 2^31, on a machine without the memory for them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def far_apart(values: torch.Tensor, dim: int, folder: Path) -> torch.Tensor:
    """``values`` in a sparse file, with a stride of 2^30 elements along ``dim`` of three entries.

    The last entry is 2^31 elements from the first: int32 arithmetic wraps to the far side, where the
    file holds zeros, so a kernel without int64 offsets gives wrong numbers and does not crash.
    """
    assert values.shape[dim] == 3
    strides = list(values.contiguous().stride())
    strides[dim] = 2**30
    before = 2**31
    extent = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)) + 1
    path = str(folder / "sparse")
    storage = torch.from_file(path, shared=True, size=before + extent, dtype=values.dtype)
    view = storage.as_strided(values.shape, strides, before)
    return view.copy_(values)


def sparse(folder: Path, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A contiguous tensor (n,) of zeros in a sparse file, with as far as int32 wraps in front of it.

    So offsets that wrap read zeros, and write where nobody looks, instead of crashing.
    """
    before = 2**31
    path = str(folder / f"sparse{len(list(folder.iterdir()))}")
    return torch.from_file(path, shared=True, size=before + n, dtype=dtype)[before:]


def start_at_program(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the interpreter number its programs from ``number``: a grid of one runs a far program alone."""
    interpreter = import_module("triton.runtime.interpreter")
    own = interpreter.InterpreterBuilder.create_get_program_id

    def numbered(builder: Any, axis: int) -> Any:
        program = own(builder, axis)
        program.data = program.data + np.int32(number)
        return program

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_get_program_id", numbered)
