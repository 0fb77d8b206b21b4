"""Train jobs that the cluster may grow, shrink and move: what users know as ``stoker.train``.

Imported lazily by ``stoker.train``; torch is imported where it is used, not here.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC: dict[str, str] = {}
"""Each public name, and the module that has it."""

__all__ = tuple(_PUBLIC)


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'stoker_train' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
