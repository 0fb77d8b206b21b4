"""``ray.cloudpickle``: the library cloudpickle itself."""

from __future__ import annotations

from typing import Any

import cloudpickle
from cloudpickle import (
    CloudPickler,
    Pickler,
    dump,
    dumps,
    load,
    loads,
    register_pickle_by_value,
    unregister_pickle_by_value,
)

__all__ = (
    "CloudPickler",
    "Pickler",
    "dump",
    "dumps",
    "load",
    "loads",
    "register_pickle_by_value",
    "unregister_pickle_by_value",
)


def __getattr__(name: str) -> Any:
    return getattr(cloudpickle, name)
