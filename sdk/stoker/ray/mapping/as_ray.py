"""``import ray`` answered by ``stoker.ray``, from the import of this module on.

``stoker.ray.install()`` imports it in a driver; workers of its job do so before they start. Processes that
one of them spawns by ``multiprocessing`` get its search path, whose last folder has a ``ray`` that does too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ConflictError
from stoker.ray.mapping.lacking import lacking, reason

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

HERE, THERE = "ray", "stoker.ray"
_NAMES = importlib.import_module(THERE)
_SEARCH_PATH = os.path.join(os.path.dirname(__file__), "search_path")


class _Finder(MetaPathFinder, Loader):
    """The finder of ``ray`` and of all below it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module below ``ray``; raise for what Stoker lacks."""
        if name != HERE and not name.startswith(HERE + "."):
            return None
        below = name.removeprefix(HERE).lstrip(".")
        if below and reason(below) is not None:
            raise lacking(below)
        if importlib.util.find_spec(THERE + name.removeprefix(HERE)) is None:
            return None
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of ``stoker.ray``, which has two names then."""
        module = importlib.import_module(THERE + spec.name.removeprefix(HERE))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it has run under its first name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state or module.__spec__


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, of a test
        return True
    if spec is None or spec.origin is None:  # just a folder of that name
        return False
    return os.path.dirname(spec.origin) != _SEARCH_PATH


if HERE not in sys.modules:
    if _is_installed(HERE):
        raise ConflictError(
            "Ray is installed here, and `import ray` means Ray\n"
            "write `import stoker.ray as ray`, or uninstall Ray"
        )
    sys.meta_path.insert(0, _Finder())
    # An import of these by their second name would set them as attributes again, over functions.
    for _name in [name for name in sys.modules if name.startswith(f"{THERE}.")]:
        sys.modules[HERE + _name.removeprefix(THERE)] = sys.modules[_name]
    sys.modules[HERE] = _NAMES
    if _SEARCH_PATH not in sys.path:
        sys.path.append(_SEARCH_PATH)


def __getattr__(name: str) -> Any:
    return getattr(_NAMES, name)
