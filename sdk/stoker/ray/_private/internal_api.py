"""``ray._private.internal_api``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import stoker

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("free",)


def free(
    object_refs: stoker.ObjectRef[Any] | Sequence[stoker.ObjectRef[Any]], local_only: bool = False
) -> None:
    """Free the values of refs now."""
    stoker.free(object_refs)
