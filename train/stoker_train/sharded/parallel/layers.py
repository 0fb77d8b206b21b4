"""The layers of a model: what ZeRO gathers at a time, and recomputation computes again.

Called by ``zero`` and ``recompute``.
"""

from __future__ import annotations

from torch import nn


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return what the outermost lists of modules hold (``nn.ModuleList``, ``nn.Sequential``), in order.

    One that stands there twice is one layer.
    """
    found: list[nn.Module] = []
    _collect(model, found)
    return list({id(layer): layer for layer in found}.values())


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    """Add the elements of the lists in ``module`` that are not in one of these elements."""
    if isinstance(module, nn.ModuleList | nn.Sequential) or getattr(module, "is_list", False):
        found.extend(module.children())
        return
    for child in module.children():
        _collect(child, found)
