"""The kernels and the modules that a call of ``apply`` is about: its ``only`` and ``skip``."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from stoker_kernels.patching.catalogue import KERNELS


class Selection:
    """Entries are kernels, as "rotary", or names of modules with wildcards, as "model.layers.0.*"."""

    def __init__(
        self, only: Iterable[str] | None, skip: Iterable[str] | None, names: list[str]
    ) -> None:
        self.only = None if only is None else _checked("only", only, names)
        self.skip = _checked("skip", skip or (), names)

    def wants(self, name: str, kernel: str) -> bool:
        """Return whether ``kernel`` is to run in the module ``name``."""
        if _matches(self.skip, name, kernel):
            return False
        return self.only is None or _matches(self.only, name, kernel)


def _matches(entries: list[str], name: str, kernel: str) -> bool:
    return any(e == kernel if e in KERNELS else fnmatchcase(name, e) for e in entries)


def _checked(which: str, entries: Iterable[str], names: list[str]) -> list[str]:
    entries = [entries] if isinstance(entries, str) else list(entries)
    for entry in entries:
        if entry not in KERNELS and not any(fnmatchcase(name, entry) for name in names):
            raise ValueError(
                f"apply: {which} {entry!r} is neither a kernel nor the name of a module\n"
                f"kernels are {', '.join(KERNELS)}; names take wildcards, as 'model.layers.0.*'"
            )
    return entries
