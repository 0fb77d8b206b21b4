"""Spans: the named parts of an attempt (``stoker.profile``), as they are in its record."""

from __future__ import annotations

from stoker_wire.messages.common import Count, Finite, Int64, Record, Time

AttributeValue = bool | Int64 | Finite | str


class Span(Record, omit_defaults=True):
    """A part of an attempt that the user's code has named (``stoker.profile``)."""

    name: str
    started_at_s: Time
    ended_at_s: Time
    attributes: dict[str, AttributeValue] = {}
    error: str = ""
    """The type of the exception with which it ended, or ''."""


class TaskSpans(Record):
    """The named parts of an attempt; ``left_out`` are those beyond its bounds."""

    items: tuple[Span, ...] = ()
    left_out: Count = 0
