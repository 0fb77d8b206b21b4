"""``ray.experimental.tqdm_ray``: progress bars of tasks and actors, shown by the driver."""

from __future__ import annotations

import importlib
from typing import Any

from stoker.ray.mapping.lacking import attribute_error

__all__ = ("safe_print",)


def safe_print(*args: Any, **options: Any) -> None:
    """Print, beside the bars."""
    print(*args, **options)  # noqa: T201 (printing is what it is for)


def __getattr__(name: str) -> Any:
    if name == "tqdm":
        return importlib.import_module("stoker.util.progress").tqdm
    raise attribute_error(__name__, name)
