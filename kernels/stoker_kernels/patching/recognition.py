"""Whether a module is exactly what it seems: its class by identity, its forward by its source.

A release of transformers that computes something else under the same name must not be replaced: a forward
is known by a digest of its code without annotations, docstrings and formatting. Used by ``catalogue``.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def digest(thing: Any) -> str:
    """Return 12 hex digits for what a module's class or a function computes, "" where there is no source.

    Methods of the class and functions of its module that it names count as well; of others, their names.
    """
    helpers = getattr(sys.modules.get(thing.__module__), "apply_rotary_pos_emb", None)
    return _digest(thing, getattr(thing, "forward", thing), helpers)


@cache
def _digest(thing: Any, function: Any, _: Any) -> str:
    # By what may be patched between two calls.
    parts: dict[str, str] = {}
    try:
        _collect(function, thing, parts)
    except (OSError, TypeError, SyntaxError):
        return ""
    text = "\n".join(parts[name] for name in sorted(parts))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _collect(function: Any, owner: Any, parts: dict[str, str]) -> None:
    function = inspect.unwrap(function)
    if function.__qualname__ in parts:
        return
    parts[function.__qualname__] = _normal(function)
    for name in function.__code__.co_names:
        method = getattr(owner, name, None) if isinstance(owner, type) else None
        other = method or function.__globals__.get(name)
        if not inspect.isfunction(other):
            continue
        if other.__module__ == owner.__module__:
            _collect(other, owner, parts)
        else:
            parts[name] = f"{other.__module__}.{other.__qualname__}"


def _normal(function: Any) -> str:
    """Return the source without what changes nothing: annotations, decorators, docstrings, layout."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns, node.decorator_list = None, []
            spec = node.args
            for argument in (
                *spec.args,
                *spec.kwonlyargs,
                *spec.posonlyargs,
                spec.vararg,
                spec.kwarg,
            ):
                if argument is not None:
                    argument.annotation = None
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def qualified(kind: type) -> str:
    """Return a class's name with its module's."""
    return f"{kind.__module__}.{kind.__qualname__}"


def altered(module: nn.Module) -> str:
    """Return what keeps ``module`` from being its class's own code, "" where nothing does."""
    if "forward" in module.__dict__:
        return "its forward has been replaced on this very module"
    if any(getattr(module, name) for name in _HOOKS):
        return "it has hooks"
    if getattr(module, "parametrizations", None):
        return "its weights are parametrized"
    return ""


def plain(module: nn.Module, kind: type) -> bool:
    """Return whether reading ``module``'s weights gives what calling it would: exactly ``kind``, no hooks."""
    return type(module) is kind and not altered(module)
