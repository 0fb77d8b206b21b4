"""How memory and tables change over a run: samples, and the slope of a straight line through them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def slope_per_hour(points: list[tuple[float, float]]) -> float:
    """Return the slope of the least-squares line through (seconds, value), per hour."""
    mean_s = sum(at_s for at_s, _ in points) / len(points)
    mean = sum(value for _, value in points) / len(points)
    spread = sum((at_s - mean_s) ** 2 for at_s, _ in points)
    if not spread:
        return 0.0
    return 3600 * sum((at_s - mean_s) * (value - mean) for at_s, value in points) / spread


class Slopes:
    """Samples of several quantities over one run."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[float, float]]] = {}

    def sample(self, values: Mapping[str, float]) -> None:
        """Note how much there is of each now."""
        now_s = time.monotonic()
        for name, value in values.items():
            self._points.setdefault(name, []).append((now_s, value))

    @property
    def span_h(self) -> float:
        """How long the samples cover."""
        points = next(iter(self._points.values()))
        return (points[-1][0] - points[0][0]) / 3600

    def per_hour(self) -> dict[str, float]:
        """Return the slope of each quantity."""
        return {name: slope_per_hour(points) for name, points in self._points.items()}

    def table(self) -> str:
        """Return one line per quantity: first and last sample, slope."""
        lines = [f"{'':24} {'first':>10} {'last':>10} {'per hour':>12}"]
        for name, points in self._points.items():
            first, last = points[0][1], points[-1][1]
            lines.append(f"{name:24} {first:>10.1f} {last:>10.1f} {slope_per_hour(points):>+12.2f}")
        return "\n".join(lines)
