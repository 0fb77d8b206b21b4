"""Label selectors as conditions, already parsed: ``wire_types`` reads what the user wrote.

A node without the label satisfies only the negated forms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
