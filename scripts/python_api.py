"""Makes ``docs/reference/python/``: the public modules, their names, signatures and docstrings.

The pages are made for the site and not kept.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

FOLDER = Path(__file__).parents[1] / "docs/reference/python"
MODULES = (
    "stoker",
    "stoker.actor",
    "stoker.jobs",
    "stoker.kv",
    "stoker.train",
    "stoker.train.elastic",
    "stoker.util",
    "stoker.util.metrics",
    "stoker.util.graph",
)
"""Others have pages of their own: ``_OWN``."""
_OWN = (("stoker.collective", "../../collectives.md"), ("stoker.data", "../../data-streams.md"),
        ("stoker.exceptions", "../../errors/README.md"),
        ("stoker.kernels", "../../kernels.md"), ("stoker.ps", "../../parameter-servers.md"),
        ("stoker.ray", "../../from-ray.md"))  # fmt: skip
_OF_OTHERS = {
    "dask_get": "A scheduler for Dask, which it needs: [from Dask](../../from-dask.md).",
    "register_stoker": "Registers joblib's backend `stoker`, and needs joblib: "
    "[from multiprocessing](../../from-multiprocessing.md).",
}
"""Names whose module imports what Stoker does not install."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def pages() -> dict[Path, str]:
    """Return every page by its path."""
    made = {FOLDER / f"{name}.md": _page(importlib.import_module(name)) for name in MODULES}
    return {FOLDER / "README.md": _index(), **made}


def _index() -> str:
    rows = "".join(
        f"| [`{name}`]({name}.md) | {_first(importlib.import_module(name))} |\n" for name in MODULES
    )
    others = "".join(f"| [`{name}`]({page}) | a page of its own |\n" for name, page in _OWN)
    return (
        "# Python\n\n<!-- Made by `make docs` from docstrings: change the text there. -->\n\n"
        f"The public modules.\n\n| module | has |\n|---|---|\n{rows}{others}"
    )


def _first(thing: Any) -> str:
    return _markdown(inspect.getdoc(thing) or "").partition("\n")[0].replace("|", r"\|")


def _page(module: ModuleType) -> str:
    head = (
        f"# {module.__name__}\n\n<!-- Made by `make docs` from docstrings: change the text there. -->\n\n"
        f"{_markdown(inspect.getdoc(module) or '')}\n"
    )
    return "\n".join([head, *(_entry(module, name) for name in _public(module))])


def _public(module: ModuleType) -> Iterator[str]:
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, thing in vars(module).items()
            if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__
        ]
    for name in sorted(names, key=str.lower):
        known = name in _OF_OTHERS or not inspect.ismodule(getattr(module, name))
        if known and not name.startswith("__"):
            yield name


def _entry(module: ModuleType, name: str) -> str:
    if name in _OF_OTHERS:
        return f"## {name}\n\n{_OF_OTHERS[name]}\n"
    thing = getattr(module, name)
    if not callable(thing):
        return f"## {name}\n\n`{type(thing).__name__}`\n"
    parts = [f"## {name}\n", f"```text\n{name}{_signature(thing)}\n```\n"]
    if text := _markdown(inspect.getdoc(thing) or ""):
        parts.append(f"{text}\n")
    if inspect.isclass(thing) and not issubclass(thing, enum.Enum | Exception):
        parts += _methods(name, thing)
    return "\n".join(parts)


def _methods(owner: str, cls: type) -> Iterator[str]:
    for name, raw in vars(cls).items():
        if name.startswith("_"):
            continue
        method = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
        if isinstance(raw, property):
            text = _markdown(inspect.getdoc(raw) or "")
            yield f"### {owner}.{name}\n\n{text or 'A property.'}\n"
        elif inspect.isfunction(method):
            text = _markdown(inspect.getdoc(method) or "")
            yield f"### {owner}.{name}\n\n```text\n{name}{_signature(method)}\n```\n\n{text}\n"


def _signature(thing: Any) -> str:
    try:
        signature = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return "(...)"
    signature = _ADDRESS.sub("", signature).replace("'", "")
    if len(signature) <= 80:
        return signature
    return "(\n    " + ",\n    ".join(_parameters(signature)) + "\n)" + _returns(signature)


def _returns(signature: str) -> str:
    return signature[_end(signature) + 1 :]


def _end(signature: str) -> int:
    depth = 0
    for at, letter in enumerate(signature):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return at
    return len(signature) - 1


def _parameters(signature: str) -> Iterator[str]:
    depth, start = 0, 1
    end = _end(signature)
    for at in range(1, end + 1):
        depth += (signature[at] in "([{") - (signature[at] in ")]}")
        if at == end or (signature[at] == "," and depth == 0):
            yield signature[start:at].strip()
            start = at + 1


def _markdown(docstring: str) -> str:
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", docstring.replace("``", "`"))
    text = re.sub(r"(?m)^::$\n?", "", text)
    text = re.sub(r"\]\((?=[\w-]+\.md)", "](../../", text)  # docstrings write them as from docs/
    return re.sub(r"(?m)::$", ":", text).strip()
