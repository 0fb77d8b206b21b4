"""The name that was probably meant, for messages about unknown fields and options.

Called only where an error is made, so it may be slow (difflib is imported late).
"""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like ``name``, or None if nothing is close."""
    import difflib

    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``"did you mean 'x'?"``, or the list of known names: the last line of a message."""
    names = sorted(known)
    near = nearest(name, names)
    if near is not None:
        return f"did you mean {near!r}?"
    if not names:
        return "none is accepted here"
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"known: {shown}"
