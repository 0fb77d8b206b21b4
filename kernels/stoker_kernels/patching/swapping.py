"""A module's class exchanged for a subclass with another ``forward``: everything else of it stays.

Parameters, buffers, hooks, names and ``isinstance`` are those of before, so checkpoints, optimizers, DDP,
FSDP2 and adapters see the same module. Used by ``applying`` and ``report``; knows no kernel.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


_ORIGINAL = "_stoker_original"
_MIXIN = "_stoker_mixin"


def swapped_class(original: Any, mixin: Any) -> type[nn.Module]:
    """Return the class with ``mixin``'s forward over ``original``'s; the same one for the same pair."""
    return _swapped_class(original, mixin)


@cache
def _swapped_class(original: Any, mixin: Any) -> type[nn.Module]:

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _restored, (original, mixin), self.__getstate__()

    body = {
        _ORIGINAL: original, _MIXIN: mixin, "__module__": mixin.__module__,
        "__doc__": mixin.__doc__, "__reduce_ex__": reduced,
    }  # fmt: skip
    kind: type[nn.Module] = type(f"Stoker{original.__name__}", (mixin, original), body)
    return kind


def _restored(original: type[nn.Module], mixin: type) -> nn.Module:
    """Make an empty module of a swapped class: pickle and copy fill it."""
    kind = swapped_class(original, mixin)
    return kind.__new__(kind)


def swap(module: nn.Module, mixin: type) -> None:
    """Give ``module`` the forward of ``mixin``."""
    module.__class__ = swapped_class(type(module), mixin)


def mixin_of(module: nn.Module) -> type | None:
    """Return whose forward ``module`` has by :func:`swap`; None for a module as its author made it."""
    return getattr(type(module), _MIXIN, None)


def restore(module: nn.Module) -> None:
    """Undo :func:`swap`. Raises ``RuntimeError`` for one that somebody has given another class since."""
    kind = type(module)
    original: type[nn.Module] | None = getattr(kind, _ORIGINAL, None)
    if original is None:
        return
    if kind is not swapped_class(original, getattr(kind, _MIXIN)):
        raise RuntimeError(
            f"undo: {kind.__name__} has been given another class since apply\n"
            "undo before fully_shard and whatever else changes classes"
        )
    module.__class__ = original
