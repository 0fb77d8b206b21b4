"""Makes Triton's interpreter twice as quick, and changes nothing that it does.

At each launch, and at each call of a jitted function by another, it looks through all members of
``triton.language`` for the builtins to replace: half of the time of kernels as small as the tests'.
Which members are builtins never changes.
"""

from __future__ import annotations

import inspect
from typing import Any


def remember_builtins() -> None:
    """Have the interpreter look for the builtins of a module or class once."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names: dict[object, list[str]] = {}

    def patch_builtin(package: Any, *scope: Any) -> None:
        if package not in names:
            members = inspect.getmembers(package)
            names[package] = [name for name, member in members if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):  # else it is replaced already
                interpreter._patch_attr(package, name, member, *scope)

    interpreter._patch_builtin = patch_builtin
