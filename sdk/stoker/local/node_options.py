"""Checks of the arguments of ``init()`` that describe a node, before any process is started."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from stoker.exceptions import BadRequestError, WrongTypeError
from stoker_wire.messages.common import MAX_NAMES

_OWN_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_MAX_SHOWN = 200


def checked_node_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``init()`` that describe a node, whole numbers as ints.

    Raises BadRequestError or WrongTypeError that names the argument.
    """
    checked = dict(options)
    for name in ("num_cpus", "num_gpus", "memory", "object_store_memory"):
        if checked.get(name) is not None:
            checked[name] = _amount(name, checked[name], field=name, whole=name != "num_cpus")
    for name in ("resources", "labels"):
        given = checked[name]
        if given is None:
            continue
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise WrongTypeError(f"{name}={_short(given)}: give a mapping by name", field=name)
        check = _check_resource if name == "resources" else _check_label
        for key, value in given.items():
            check(key, value)
        checked[name] = dict(given)
    if len(checked["labels"] or ()) > MAX_NAMES:
        text = f"labels: a node has {MAX_NAMES} at most, these are {len(checked['labels'])}"
        raise BadRequestError(text, field="labels")
    return checked


def check_texts(**options: Any) -> None:
    """Raise for what is neither a text nor None, and for an empty text, before a cluster is started."""
    for name, value in options.items():
        if value is not None and not isinstance(value, str):
            raise WrongTypeError(f"{name}={_short(value)}: give a text", field=name)
        if value == "":
            raise BadRequestError(f"{name} is empty\ngive a name, or leave it out", field=name)


def checked_port(port: Any) -> int:
    """Return a port to listen on, 0 for a free one; raises for what is none."""
    if isinstance(port, bool) or not isinstance(port, int):
        raise WrongTypeError(f"port={_short(port)}: give a whole number", field="port")
    if not 0 <= port < 1 << 16:
        raise BadRequestError(f"port={port}: give 1 to 65535, or 0 for a free one", field="port")
    return port


def _check_resource(name: str, amount: Any) -> None:
    if name in _OWN_OPTIONS:
        text = f"resources[{name!r}]: use the argument {_OWN_OPTIONS[name]}= for it"
        raise BadRequestError(text, field="resources")
    _amount(f"resources[{name!r}]", amount, field="resources", whole=False)


def _check_label(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise WrongTypeError(f"labels[{name!r}]={_short(value)}: give text", field="labels")


def _amount(name: str, amount: Any, *, field: str, whole: bool) -> float:
    if isinstance(amount, bool) or not isinstance(amount, numbers.Real):
        kind = "a number of bytes" if name == "memory" else "a number"
        raise WrongTypeError(f"{name}={_short(amount)}: give {kind}", field=field)
    value = float(amount)
    if not 0 <= value < math.inf:
        raise BadRequestError(f"{name}={amount} is not an amount: give 0 or more", field=field)
    if not whole:
        return value
    if not value.is_integer():
        raise BadRequestError(f"{name}={amount}: give a whole number", field=field)
    return int(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
