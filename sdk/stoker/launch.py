"""The entry point of head and node processes, ``python -m stoker.launch``, and of those who start them.

A stable name for what is in :mod:`stoker.local`: process listings, tests and users' scripts know it.
"""

from __future__ import annotations

import sys

from stoker.local.cluster import LocalCluster, spawn_local, start_local
from stoker.local.main import main
from stoker.local.sessions import LocalInfo, find_running

__all__ = (
    "LocalCluster",
    "LocalInfo",
    "find_running",
    "main",
    "spawn_local",
    "start_local",
)

if __name__ == "__main__":
    sys.exit(main())
