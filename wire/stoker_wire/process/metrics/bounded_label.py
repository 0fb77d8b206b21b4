"""A label whose values users choose, such as names of functions: so many at once, the rest is ``other``."""

from __future__ import annotations

import time
from collections.abc import Callable

OTHER = "other"
IDLE_S = 3600.0
"""A value that was not used for so long makes room for another."""
_LOOK_S = 10.0
_MAX_CHARACTERS = 200


class BoundedLabel:
    """The values of one label, at most ``limit``; ``forget`` is called with each that makes room."""

    def __init__(
        self,
        limit: int,
        forget: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._forget = forget
        self._clock = clock
        self._used_s: dict[str, float] = {}
        self._looked_s = float("-inf")

    def of(self, text: str) -> str:
        """Return the value for a text: itself, or ``other`` if there are too many."""
        text = text[:_MAX_CHARACTERS] or OTHER
        now_s = self._clock()
        if text not in self._used_s and not self._has_room(now_s):
            return OTHER
        self._used_s[text] = now_s
        return text

    def _has_room(self, now_s: float) -> bool:
        if len(self._used_s) >= self._limit and now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            for text in [one for one, used_s in self._used_s.items() if now_s - used_s > IDLE_S]:
                del self._used_s[text]
                self._forget(text)
        return len(self._used_s) < self._limit
