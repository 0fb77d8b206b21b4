"""A job's ``sys.path``: the form in which a driver sends it, and its merge into a worker's.

Entries of the interpreter (standard library, site-packages) are not sent: each process has its own.
``OWN`` stands for them, so that what the driver searches first, workers search first, and what it
searches last, last. Pure but for :func:`apply_path`.
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
    folders = {*site.getsitepackages(), site.getusersitepackages()}
    folders |= {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    for prefix in (sys.base_prefix, sys.base_exec_prefix):
        library = os.path.join(prefix, sys.platlibdir)
        folder = os.path.join(library, f"python{major}.{minor}")
        archive = os.path.join(library, f"python{major}{minor}.zip")
        folders |= {archive, folder, os.path.join(folder, "lib-dynload")}
    return frozenset(folders | {sysconfig.get_path(n) for n in ("stdlib", "platstdlib")})


def portable_path(path: Sequence[str], own: Collection[str], cwd: str) -> tuple[str, ...]:
    """Return ``path`` as it is sent; an empty entry is the current folder ``cwd``."""
    before: list[str] = []
    after: list[str] = []
    into = before
    for entry in path:
        if entry in own:
            into = after
        elif entry or cwd:
            into.append(os.path.join(cwd, entry).rstrip("/") or "/")
    return (*dict.fromkeys(before), OWN, *dict.fromkeys(after))


def merged_path(sent: Sequence[str], base: Sequence[str], foreign: Collection[str]) -> list[str]:
    """Return the search path of a worker whose own is ``base``, for a job that sent ``sent``.

    ``foreign`` are entries that others gave this process, which the job has only if it sent them.
    Without ``OWN`` the entries that were sent come in front.
    """
    at = sent.index(OWN) if OWN in sent else len(sent)
    front, back = list(sent[:at]), list(sent[at + 1 :])
    if at == len(sent):
        return [entry for entry in front if entry not in base] + list(base)
    rest = [e for e in base if e not in front and (e not in foreign or e in back)]
    return [*front, *rest, *(e for e in back if e not in rest and e not in front)]


def apply_path(sent: Sequence[str]) -> None:
    """Set ``sys.path`` to what a job sent, in a worker."""
    if sent:
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = merged_path(sent, sys.path, given)
