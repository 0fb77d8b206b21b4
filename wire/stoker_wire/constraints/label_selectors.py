"""The grammar of label selectors, as in ``label_selector={"zone": "in(a,b)"}``.

The sdk checks what a user gives by it, and the scheduler matches nodes by it: one parser, so that
what is accepted is what is matched. Pure.
"""

from __future__ import annotations

import re

GRAMMAR = (
    "write a value, '!value', 'in(a,b)' or '!in(a,b)'; a value starts with a letter or a digit and "
    "goes on with these, spaces and any of . _ - / + : @"
)
NODE_ID_LABEL = "stoker.io/node-id"
ADDRESS_LABEL = "stoker.io/address"
HEAD_LABEL = "stoker.io/head"
"""Labels that a node has by itself: its id, the host in its URL, and of that of ``start --head`` ``true``."""
_VALUE = re.compile(r"\w[\w ./+:@-]*")


def parse_value(label: str, written: str) -> tuple[tuple[str, ...], bool]:
    """Return (the values, whether they are excluded) of one label's condition.

    Raises ValueError, with the grammar, for what cannot be read.
    """
    body = written.strip()
    negated = body.startswith("!")
    body = body[1:].strip() if negated else body
    listed = body.startswith("in(") and body.endswith(")")
    values = [part.strip() for part in body[3:-1].split(",")] if listed else [body]
    if not label or not all(_VALUE.fullmatch(value) for value in values):
        raise ValueError(f"{label}={written!r} cannot be read\n{GRAMMAR}")
    return tuple(sorted(set(values))), negated
