"""One typical call of every op, by name: what benchmarks time, tests compile, and tuners tune.

Each op's ``workload.py`` holds its ``WORKLOADS``. They make their own inputs for any device, ``meta``
included, so the same definition is measured on a GPU, compiled without one and run on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

from stoker_kernels import ops

MODULES = (
    "stoker_kernels.optim.workload",
    *(f"{ops.__name__}.{folder.name}.workload" for folder in iter_modules(ops.__path__)),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """The least that an op must do: bytes through device memory and floating-point operations."""

    forward_nbytes: float = 0.0
    backward_nbytes: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """An op, the inputs of a typical call, and what that call costs at least.

    ``inputs(device, dtype, **shape)`` makes the keyword arguments of ``run``; tensors to be
    differentiated require gradients. ``run(**inputs)`` returns a tensor or a tuple of tensors.
    ``cost(dtype, **shape)`` counts each input read once and each output written once.
    ``shape`` is the size to measure, ``small`` one that a test can interpret, ``variants`` are further
    entries of ``shape`` whose machine code is another.
    """

    name: str
    inputs: Callable[..., dict[str, Any]]
    run: Callable[..., Any]
    cost: Callable[..., Cost]
    shape: Mapping[str, int]
    small: Mapping[str, int]
    variants: tuple[Mapping[str, int], ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    differentiable: bool = True
    launches: bool = True  # False: PyTorch's own operations alone

    def call(self, device: torch.device | str, dtype: torch.dtype, **shape: int) -> Any:
        """Run once, forward and (where differentiable) backward; returns the outputs.

        ``shape`` overrides single entries of the default. Raises ``TypeError`` for an entry it has not.
        """
        outputs = self.run(**self.inputs(device, dtype, **self.sized(**shape)))
        if self.differentiable:
            tensors = outputs if isinstance(outputs, tuple) else (outputs,)
            wanted = [t for t in tensors if t.requires_grad]
            torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])
        return outputs

    def sized(self, **shape: int) -> dict[str, int]:
        """Return the default shape with single entries replaced."""
        unknown = shape.keys() - self.shape.keys()
        if unknown:
            raise TypeError(
                f"workload {self.name!r} has no size {sorted(unknown)[0]!r}: "
                f"its sizes are {', '.join(self.shape)}"
            )
        return {**self.shape, **shape}


def tensors_cost(forward: int, backward: int) -> Callable[..., Cost]:
    """Return the ``cost`` of a memory-bound op over (rows, columns).

    ``forward`` and ``backward`` count the tensors of that size that a pass reads or writes.
    """

    def cost(dtype: torch.dtype, rows: int, columns: int) -> Cost:
        nbytes = rows * columns * dtype.itemsize
        return Cost(forward_nbytes=forward * nbytes, backward_nbytes=backward * nbytes)

    return cost


@cache
def workloads() -> dict[str, Workload]:
    """Return every workload, by name, in the order of the catalogue."""
    catalogue: dict[str, Workload] = {}
    for module in MODULES:
        for workload in import_module(module).WORKLOADS:
            catalogue[workload.name] = workload
    return catalogue


def workload(name: str) -> Workload:
    """Return the workload called ``name``. Raises ``KeyError`` that lists the names there are."""
    try:
        return workloads()[name]
    except KeyError:
        raise KeyError(f"no workload {name!r}: there are {', '.join(workloads())}") from None
