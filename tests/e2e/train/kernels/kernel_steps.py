"""What the tests of kernels on a cluster send along: steps to compile, and a look at Triton's cache."""

from __future__ import annotations

from typing import Any


def step() -> None:
    """One step of a small model, on whatever device new tensors are."""
    import torch

    from stoker_kernels import rms_norm

    x = torch.empty(64, 256, dtype=torch.bfloat16, requires_grad=True)
    rms_norm(x, torch.ones(256, dtype=torch.bfloat16)).sum().backward()


def broken_step() -> None:
    """A user's mistake."""
    raise ValueError("the shapes do not match")


def lookups(specs: list[Any], arch: int = 90) -> list[bool]:
    """Compile ``specs`` here and now; for each kernel whether Triton's cache had it."""
    from stoker_kernels.aot.command import compile_specs
    from stoker_kernels.aot.specs import make_spec

    found: list[bool] = []
    made = [make_spec(spec, f"kernels[{index}]") for index, spec in enumerate(specs)]
    compile_specs(made, arch, lambda record: found.append(record["cached"]))
    return found
