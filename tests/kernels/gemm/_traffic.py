"""Counts what an interpreted kernel moves: launches, and the values of each load and store."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


@dataclass(slots=True)
class Traffic:
    """Values that passed between a kernel and memory, masked ones left out."""

    launches: int = 0
    loaded: int = 0
    stored: int = 0


def watch(monkeypatch: pytest.MonkeyPatch, module: Any) -> Traffic:
    """Count from now on what the launches of ``module`` move."""
    seen = Traffic()
    builder = import_module("triton.runtime.interpreter").InterpreterBuilder
    load, store, launch = builder.create_masked_load, builder.create_masked_store, module.launch

    def counted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        seen.loaded += int(mask.data.sum())
        return load(self, ptrs, mask, *rest)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        seen.stored += int(mask.data.sum())
        return store(self, ptrs, value, mask, *rest)

    def counted_launch(*args: Any, **config: Any) -> None:
        seen.launches += 1
        launch(*args, **config)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    monkeypatch.setattr(module, "launch", counted_launch)
    return seen
