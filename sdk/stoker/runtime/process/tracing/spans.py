"""The spans that user code has named, until the record of their attempt is written.

Those outside of any attempt, a driver's for one, are kept apart: the runtime writes records of its own for
them. Any thread adds; both kinds are bounded, and what is beyond is counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stoker.runtime.process.current_task import current_task
from stoker_wire.data.spans import Span, TaskSpans
from stoker_wire.messages.common import MAX_INT64

if TYPE_CHECKING:
    from stoker_wire.data.spans import AttributeValue

MAX_SPANS = 256
"""Spans of one attempt."""
MAX_OWN_SPANS = 10_000
"""Spans of one process outside of attempts."""
MAX_TEXT = 128
"""Characters of a name and of an attribute."""
MAX_ATTRIBUTES = 16
MAX_NBYTES = 32 << 10
"""The text of an attempt's spans together."""
_MAX_ATTEMPTS = 4096
"""Attempts with spans at once: threads that outlive theirs may name spans of it."""


_PLAIN = frozenset({bool, int, float, str})
_Row = tuple[str, float, float, Mapping[str, Any], str]
"""The members of a :class:`Span`, which is made when it is recorded: code that is timed has no time."""


class SpanList:
    """The spans of an attempt, or of a process. ``left_out`` were too many, or too large."""

    __slots__ = ("left_out", "rows")

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.left_out = 0

    def record(self) -> TaskSpans:
        """Return them as they are recorded."""
        spans: list[Span] = []
        nbytes, left_out = 0, self.left_out
        for name, started_at_s, ended_at_s, attributes, error in self.rows:
            kept = bounded(attributes) if attributes else {}
            nbytes += len(name) + len(error) + _nbytes_of(kept)
            if nbytes > MAX_NBYTES:
                left_out += 1
                continue
            spans.append(
                Span(
                    name=name,
                    started_at_s=started_at_s,
                    ended_at_s=ended_at_s,
                    attributes=kept,
                    error=error,
                )
            )
        return TaskSpans(items=tuple(spans), left_out=left_out)


class Spans:
    """The spans of this process that are not recorded yet."""

    def __init__(self) -> None:
        self.by_task: dict[str, SpanList] = {}
        """Those of the attempts that run here. Empty, and false, while no code names spans."""
        self.own = SpanList()
        """Those of no attempt."""
        self._own_left = MAX_OWN_SPANS

    def add(
        self,
        name: str,
        started_at_s: float,
        ended_at_s: float,
        attributes: Mapping[str, Any],
        error: str,
    ) -> None:
        """Add a span of the task that the calling code runs in, or of this process."""
        info = current_task.get()
        if info is None:
            spans = self.own
            if self._own_left <= 0:
                spans.left_out += 1
                return
            self._own_left -= 1
        else:
            spans = self.by_task.get(info.task_id) or self._begin(info.task_id)
        if len(spans.rows) >= MAX_SPANS:
            spans.left_out += 1
            return
        if attributes and not _PLAIN.issuperset(map(type, attributes.values())):
            attributes = bounded(attributes)  # what they are now, and no object is kept
        spans.rows.append((name, started_at_s, ended_at_s, attributes, error))

    def _begin(self, task_id: str) -> SpanList:
        while len(self.by_task) >= _MAX_ATTEMPTS:
            self.by_task.pop(next(iter(self.by_task)), None)
        return self.by_task.setdefault(task_id, SpanList())

    def take(self, task_id: str) -> TaskSpans | None:
        """Return the spans of an attempt that has ended, and forget them."""
        spans = self.by_task.pop(task_id, None)
        return None if spans is None else spans.record()

    def take_own(self) -> TaskSpans | None:
        """Return the spans of no attempt, and forget them; None if there are none."""
        if not self.own.rows and not self.own.left_out:
            return None
        own, self.own = self.own, SpanList()
        return own.record()


def bounded(attributes: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """Return attributes as they can be recorded."""
    kept: dict[str, AttributeValue] = {}
    for name, value in attributes.items():
        if len(kept) == MAX_ATTRIBUTES:
            break
        kept[name[:MAX_TEXT]] = value[:MAX_TEXT] if type(value) is str else _value(value)
    return kept


def _value(value: Any) -> AttributeValue:
    kind = type(value)
    if kind is bool or (kind is int and abs(value) <= MAX_INT64):
        return value  # type: ignore[no-any-return]
    if kind is float and math.isfinite(value):
        return value  # type: ignore[no-any-return]
    try:
        return str(value)[:MAX_TEXT]
    except Exception:  # of the user's class
        return f"<{kind.__name__}>"


def _nbytes_of(attributes: Mapping[str, AttributeValue]) -> int:
    texts = (len(value) if isinstance(value, str) else 8 for value in attributes.values())
    return sum(map(len, attributes)) + sum(texts)


SPANS = Spans()
