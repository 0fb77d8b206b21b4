"""The W3C trace context: its two headers, and the variables that give it to a program, as one text.

The text is the ``traceparent`` and, behind a space, the ``tracestate``. What is not valid is no context: a
trace is never a reason to refuse a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PARENT_LENGTH = 55
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")


def joined(traceparent: str, tracestate: str = "") -> str:
    """Return a context as it travels; '' if the traceparent is none."""
    parent = traceparent.strip()
    if _PARENT.match(parent) is None:
        return ""
    rest = parent[PARENT_LENGTH:]  # of a later version
    if rest and (parent.startswith("00") or not rest.startswith("-")):
        return ""
    state = tracestate.strip()
    known = f"00{parent[2:PARENT_LENGTH]}"
    return f"{known} {state}" if _STATE.fullmatch(state) else known


def split(trace: str) -> tuple[str, str]:
    """Return the traceparent and the tracestate of a context."""
    parent, _, state = trace.partition(" ")
    return parent, state


def of_headers(headers: Mapping[str, str]) -> str:
    """Return the context of a request, '' for none."""
    return joined(headers.get("traceparent", ""), headers.get("tracestate", ""))


def of_variables(environ: Mapping[str, str]) -> str:
    """Return the context that whoever started a program gave it, '' for none."""
    return joined(environ.get("TRACEPARENT", ""), environ.get("TRACESTATE", ""))


def variables(trace: str) -> dict[str, str]:
    """Return the variables that give a program a context."""
    if not trace:
        return {}
    parent, state = split(trace)
    return {"TRACEPARENT": parent} | ({"TRACESTATE": state} if state else {})
