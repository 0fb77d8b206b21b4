"""Filters that several lists and watches share: by state, and by the kind and subject of events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.errors import BadRequestError
from stoker_wire.suggestions import suggestion

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import StrEnum

    from stoker_wire.messages.control import Event


def state_filter(text: str, known: type[StrEnum]) -> str | tuple[str, ...]:
    """Return the condition of a filter by state; BadRequestError names the nearest valid one."""
    if not text:
        return ""
    states = tuple(text.split(","))
    names = [state.value for state in known]
    for name in states:
        if name not in names:
            raise BadRequestError(
                f"state: {name!r} is none\n{suggestion(name, names)}", field="state"
            )
    return states[0] if len(states) == 1 else states


def event_filter(kinds: str, subjects: str = "", by: str = "") -> Callable[[Event], bool]:
    """Return a predicate: kind and subject each start with one of these comma-separated prefixes.

    ``by`` are names of people, of whom one made it.
    """
    names = frozenset(part for part in by.split(",") if part)
    kind_prefixes = tuple(part for part in kinds.split(",") if part)
    subject_prefixes = tuple(part for part in subjects.split(",") if part)

    def matches(event: Event) -> bool:
        if names and (event.by is None or event.by.name not in names):
            return False
        return (not kind_prefixes or event.kind.startswith(kind_prefixes)) and (
            not subject_prefixes or event.subject.startswith(subject_prefixes)
        )

    return matches
