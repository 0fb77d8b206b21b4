"""``stoker.train``: the cluster's services for training: process groups, reports of their progress,
kernels tuned to its GPUs, and elastic jobs.

torch is imported when a process group is made or a kernel measured, not here. Elastic training is
``stoker_train``, loaded when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from stoker.train.autotuning import autotune
from stoker.train.rendezvous import destroy_process_group, init_process_group
from stoker.train.reporting import report
from stoker.train.torchrun import env, run
from stoker.train.warming import warm

__all__ = (
    "autotune",
    "destroy_process_group",
    "env",
    "init_process_group",
    "report",
    "run",
    "warm",
)


def __getattr__(name: str) -> Any:
    """Return a public name of ``stoker_train``, which is built on this package."""
    module = importlib.import_module("stoker_train")
    if name in module.__all__:
        return getattr(module, name)
    raise AttributeError(f"module 'stoker.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("stoker_train").__all__})
