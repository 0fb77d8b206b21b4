"""Label selectors as conditions; their grammar is in :mod:`stoker_wire.label_selectors`.

A node without the label satisfies only the negated forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker_scheduler.core.model.resources import InvalidDemandError
from stoker_wire.label_selectors import parse_value


@dataclass(frozen=True, slots=True)
class Term:
    """One label's condition: the value is (or, negated, is not) among ``values``."""

    label: str
    values: tuple[str, ...]
    negated: bool = False

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Return whether a node with ``labels`` satisfies the condition."""
        return (labels.get(self.label) in self.values) is not self.negated

    @property
    def text(self) -> str:
        """The condition as the user wrote it."""
        body = self.values[0] if len(self.values) == 1 else f"in({','.join(self.values)})"
        return f"{self.label}={'!' if self.negated else ''}{body}"


def parse_selector(selector: Mapping[str, str]) -> tuple[Term, ...]:
    """Return the conditions of ``selector``, ordered by label; reject what cannot be read."""
    return tuple(_parse(label, selector[label]) for label in sorted(selector))


def _parse(label: str, written: str) -> Term:
    try:
        values, negated = parse_value(label, written)
    except ValueError as error:
        raise InvalidDemandError(f"label_selector.{label}", f"label_selector: {error}") from None
    return Term(label, values, negated)
