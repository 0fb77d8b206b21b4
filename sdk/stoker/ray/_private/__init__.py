"""``ray._private``: the few of Ray's internals that its documentation and public programs use."""

from __future__ import annotations

import importlib
from typing import Any

from stoker.ray.mapping.lacking import attribute_error


def __getattr__(name: str) -> Any:
    if name in ("internal_api", "ray_constants"):
        return importlib.import_module(f"{__name__}.{name}")
    raise attribute_error(__name__, name)
