"""Taints of nodes and tolerations of requirements: which work keeps away from a node, or must leave it.

The rules are those of Kubernetes. A cluster without taints pays nothing for them: what a node's taints forbid
is known to its spec, and is looked at there first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Effect(StrEnum):
    """Effect of a taint on work that does not tolerate it; the values are those of the wire."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node, and when it was set."""

    key: str
    value: str
    effect: Effect
    at_s: float = 0.0

    @property
    def text(self) -> str:
        """The taint as people write it."""
        return (
            f"{self.key}={self.value}:{self.effect}" if self.value else f"{self.key}:{self.effect}"
        )


@dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration: of one key or all (empty), one value or all, one effect or all (None).

    ``toleration_seconds`` is how long a NoExecute taint is tolerated, None for ever.
    """

    key: str = ""
    value: str | None = None
    effect: Effect | None = None
    toleration_seconds: float | None = None

    def tolerates(self, taint: Taint) -> bool:
        """Return whether it is about ``taint``."""
        return (
            self.key in ("", taint.key)
            and self.value in (None, taint.value)
            and self.effect in (None, taint.effect)
        )


Tolerations = tuple[Toleration, ...]


def untolerated(
    taints: tuple[Taint, ...], tolerations: Tolerations, effects: frozenset[Effect]
) -> tuple[Taint, ...]:
    """Return those of ``taints`` with one of these effects that nothing tolerates."""
    return tuple(
        taint
        for taint in taints
        if taint.effect in effects and not any(one.tolerates(taint) for one in tolerations)
    )


FORBIDDING = frozenset({Effect.NO_SCHEDULE, Effect.NO_EXECUTE})
DISCOURAGING = frozenset({Effect.PREFER_NO_SCHEDULE})


def leaves_at(taint: Taint, tolerations: Tolerations) -> float:
    """Return when work must leave a node with a NoExecute taint: at once, later, or never (inf)."""
    fitting = [one.toleration_seconds for one in tolerations if one.tolerates(taint)]
    if not fitting:
        return -math.inf
    limits = [seconds for seconds in fitting if seconds is not None]
    return taint.at_s + min(limits) if limits else math.inf
