"""The documentation of options: written at their fields, shown by docstrings and ``docs/options.md``.

``options.py`` has an :class:`Option` at each field; that text is the only one. ``import stoker`` waits
for :func:`documented`, so it reads evaluated annotations and does not import textwrap.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K", bound=type[msgspec.Struct])
_PLAIN = {float: "number", int: "whole number", bool: "True or False", str: "text", dict: "mapping"}
_WIDTH = 88


class _Meaning(msgspec.Struct, frozen=True):
    meaning: str


class Option(_Meaning, frozen=True, kw_only=True):
    """The documentation of one option."""

    by: str
    """The processes that enforce it: caller, gcs, scheduler, nodelet, worker."""
    example: str
    """As the keyword argument is written; for ``NodeAffinity`` the whole call."""
    unit: str = ""
    """Empty where the values count nothing."""
    default: str = ""
    """In words; empty where the field's own says it."""
    takes: str = ""
    """Its values in words; empty where the annotation says it."""

    def __repr__(self) -> str:
        """Return next to nothing: signatures of the classes show it."""
        return "..."


def options_of(kind: type[msgspec.Struct]) -> dict[str, Option]:
    """Return the documentation of each field of ``kind``, complete, by name."""
    fields, defaults = kind.__struct_fields__, kind.__struct_defaults__
    default_of = dict(zip(reversed(fields), reversed(defaults), strict=False))
    hints = _hints(kind)
    return {name: _complete(hints[name], default_of.get(name)) for name in fields}


def words_of(kind: type[msgspec.Struct], name: str) -> list[str]:
    """Return the texts that the annotation of a field names."""
    bare = get_args(_hints(kind).get(name))[:1]
    kinds = [each for hint in bare for each in (hint, *get_args(hint))]
    return [v for each in kinds if get_origin(each) is Literal for v in get_args(each)]


def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for cls in reversed(kind.__mro__):
        hints |= inspect.get_annotations(cls)
    return hints


def _complete(hint: Any, default: Any) -> Option:
    *rest, option = get_args(hint)
    assert isinstance(option, Option)
    return msgspec.structs.replace(
        option,
        default=option.default or ("none" if default is None else repr(default)),
        takes=option.takes or " or ".join(_takes(*rest)),
    )


def _takes(hint: Any, *limits: msgspec.Meta) -> list[str]:
    """Return the alternatives of an annotation in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _takes(*args)
    if origin is Literal:
        return [repr(value) for value in args]
    if (plain := _PLAIN.get(origin or hint)) is not None:
        return [", ".join([plain, *(f"at least {limit.ge:g}" for limit in limits)])]
    return [words for each in args if each is not type(None) for words in _takes(each)]


def documented(kind: K) -> K:
    """Add its options to the docstring of a class."""
    if kind.__doc__ is not None:  # no -OO
        listed = "\n".join(_entry(name, option) for name, option in options_of(kind).items())
        kind.__doc__ = f"{inspect.cleandoc(kind.__doc__)}\n\n{listed}"
    return kind


def with_options(*kinds: type[msgspec.Struct]) -> Callable[[F], F]:
    """Add what the docstrings of ``kinds`` say to that of a function."""

    def added(function: F) -> F:
        if function.__doc__ is not None:
            texts = [kind.__doc__ or "" for kind in kinds]
            function.__doc__ = "\n\n".join([inspect.cleandoc(function.__doc__), *texts])
        return function

    return added


def _entry(name: str, option: Option) -> str:
    """Return an option as docstrings list it."""
    unit = f" ({option.unit})" if option.unit else ""
    lines = [f"{name}: {option.takes}{unit}", *_wrapped(option.meaning)]
    lines += _wrapped(f"Default: {option.default}. Enforced by: {option.by}.")
    return "\n".join([*lines, f"    Example: {option.example}"])


def _wrapped(text: str) -> Iterator[str]:
    """Yield the lines of a paragraph, indented."""
    line = "   "
    for word in text.split(" "):
        if len(line) + len(word) >= _WIDTH:
            yield line
            line = f"    {word}"
        else:
            line = f"{line} {word}"
    yield line
