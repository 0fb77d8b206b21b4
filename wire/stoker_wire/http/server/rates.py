"""Rates: how often one caller may ask for what costs a service much, and fail to show a token.

A bucket for each principal, and for each address that shows no valid token; held in memory, by each service
for itself. The dispatcher asks before an expensive route is called. Services are exempt, as what they ask is
bounded by what others asked of them, and so are admins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker_wire.errors import RateLimitedError, UnauthorizedError

if TYPE_CHECKING:
    from stoker_wire.http.principals import Principal
    from stoker_wire.settings import Settings

BURST_S = 20.0
"""A bucket holds what comes together in this time."""
_MAX_BUCKETS = 10_000


class Bucket:
    """Token buckets with ``per_s`` tokens a second (0: no limit), by key; those used least are forgotten."""

    def __init__(self, per_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = 1 / per_s if per_s else 0.0
        self._now = now
        # When the bucket of a key is full again; in the order of last use.
        self._full_at_s: dict[str, float] = {}

    def take(self, key: str) -> float:
        """Take a token; return 0, or for how many seconds there is none."""
        if not self._interval_s:
            return 0.0
        now_s = self._now()
        full_at_s = max(self._full_at_s.pop(key, 0.0), now_s)
        wait_s = full_at_s + self._interval_s - now_s - BURST_S
        if wait_s <= 0:
            full_at_s += self._interval_s
        self._full_at_s[key] = full_at_s
        if len(self._full_at_s) > _MAX_BUCKETS:
            del self._full_at_s[next(iter(self._full_at_s))]
        return max(wait_s, 0.0)

    def __len__(self) -> int:
        return len(self._full_at_s)


class Rates:
    """The rates of one service."""

    def __init__(self, settings: Settings) -> None:
        self._expensive = Bucket(settings.expensive_per_s)
        self._failures = Bucket(settings.failures_per_s)

    def spend(self, principal: Principal) -> None:
        """Count a call of an expensive route; RateLimitedError if ``principal`` has made too many."""
        if principal.owns_all:
            return
        wait_s = self._expensive.take(str(principal))
        if wait_s:
            raise _limited(f"{principal} has asked too often for what costs much", wait_s)

    def judge(self, error: Exception, address: str | None) -> Exception:
        """Return ``error``, or a RateLimitedError where ``address`` has shown too many wrong tokens."""
        if not isinstance(error, UnauthorizedError):
            return error
        wait_s = self._failures.take(address or "")
        if not wait_s:
            return error
        return _limited("too many requests without a valid token came from this address", wait_s)


def _limited(what: str, wait_s: float) -> RateLimitedError:
    return RateLimitedError(
        f"{what}\nwait {wait_s:.1f} s", extra={"retry_after_s": round(wait_s, 3)}
    )
