"""Label selectors: ``value``, ``!value``, ``in(a,b)`` and ``!in(a,b)``.

A node without the label satisfies only the negated forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker_scheduler.core.resources import InvalidDemandError


@dataclass(frozen=True, slots=True)
class Term:
    """One label's condition: the value is (or, negated, is not) among ``values``."""

    label: str
    values: tuple[str, ...]
    negated: bool = False

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with ``labels`` satisfies the condition."""
        return (labels.get(self.label) in self.values) is not self.negated

    @property
    def text(self) -> str:
        """The condition as the user wrote it."""
        body = self.values[0] if len(self.values) == 1 else f"in({','.join(self.values)})"
        return f"{self.label}={'!' if self.negated else ''}{body}"


def parse_selector(selector: Mapping[str, str]) -> tuple[Term, ...]:
    """Return the conditions of ``selector``, ordered by label; refuse what cannot be read."""
    return tuple(_parse(label, selector[label]) for label in sorted(selector))


def _parse(label: str, written: str) -> Term:
    body = written.strip()
    negated = body.startswith("!")
    body = body[1:].strip() if negated else body
    if body.startswith("in(") and body.endswith(")"):
        values = tuple(sorted({part.strip() for part in body[3:-1].split(",")} - {""}))
    else:
        values = (body,) if body and not body.startswith("in(") else ()
    if not label or not values:
        raise InvalidDemandError(
            f"label_selector.{label}",
            f"label_selector: {label}={written!r} cannot be read: write a value, '!value', "
            "'in(a,b)' or '!in(a,b)'",
        )
    return Term(label, values, negated)
