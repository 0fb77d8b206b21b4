"""``ray.experimental.tqdm_ray``: progress bars of tasks and actors, shown by the driver."""

from __future__ import annotations

from typing import Any

from stoker.util.progress import tqdm

__all__ = ("safe_print", "tqdm")


def safe_print(*args: Any, **options: Any) -> None:
    """Print, beside the bars."""
    print(*args, **options)  # noqa: T201 (printing is what it is for)
