"""``ray.util.annotations``: marks of an API's stability, which libraries put on their own."""

from __future__ import annotations

from typing import Any


def PublicAPI(*args: Any, **_options: Any) -> Any:
    """Return what is marked, as it is."""
    return args[0] if args else lambda marked: marked


DeveloperAPI = Deprecated = PublicAPI

__all__ = ("Deprecated", "DeveloperAPI", "PublicAPI")
