"""A job's ``sys.path``: how a driver says its own, and how a worker takes it over. Pure but for ``sys``.

What lies in the interpreter (standard library, site-packages) is not said: each process has its own.
``OWN`` stands for it, so that what the driver searches first, workers search first, and what it
searches last, last.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence

OWN = ""
"""Stands for the interpreter's own folders in a path that is passed on."""


def own_folders() -> frozenset[str]:
    """Return the folders and archives that belong to this interpreter and its environment."""
    import site
    import sysconfig

    major, minor = sys.version_info[:2]
    found = {*site.getsitepackages(), site.getusersitepackages()}
    found |= {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    for prefix in (sys.base_prefix, sys.base_exec_prefix):
        library = os.path.join(prefix, sys.platlibdir)
        folder = os.path.join(library, f"python{major}.{minor}")
        archive = os.path.join(library, f"python{major}{minor}.zip")
        found |= {archive, folder, os.path.join(folder, "lib-dynload")}
    return frozenset(found | {sysconfig.get_path(n) for n in ("stdlib", "platstdlib")})


def told(path: Sequence[str], own: Collection[str], cwd: str) -> tuple[str, ...]:
    """Return ``path`` as it is passed on; an empty entry is the current folder ``cwd``."""
    before: list[str] = []
    after: list[str] = []
    into = before
    for entry in path:
        if entry in own:
            into = after
        elif entry or cwd:
            into.append(os.path.join(cwd, entry).rstrip("/") or "/")
    return (*dict.fromkeys(before), OWN, *dict.fromkeys(after))


def taken_over(said: Sequence[str], base: Sequence[str], foreign: Collection[str]) -> list[str]:
    """Return the search path of a worker whose own is ``base``, for a job that ``said`` its path.

    ``foreign`` are entries that others gave this process, which the job has only if it says so.
    Without ``OWN`` what is said comes in front.
    """
    at = said.index(OWN) if OWN in said else len(said)
    front, back = list(said[:at]), list(said[at + 1 :])
    if at == len(said):
        return [entry for entry in front if entry not in base] + list(base)
    rest = [e for e in base if e not in front and (e not in foreign or e in back)]
    return [*front, *rest, *(e for e in back if e not in rest and e not in front)]


def take_over(said: Sequence[str]) -> None:
    """Make ``sys.path`` what a job said, in a worker."""
    if said:
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = taken_over(said, sys.path, given)
