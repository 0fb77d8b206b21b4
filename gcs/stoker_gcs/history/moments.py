"""The grammar of a moment: a sequence number, a time in ISO 8601, or seconds since the epoch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from stoker_wire.errors import BadRequestError

if TYPE_CHECKING:
    from stoker_gcs.state.numbering import Numbering

_WHOLE = re.compile(r"[0-9]{1,18}")
_SECONDS = re.compile(r"[0-9]{1,11}(\.[0-9]*)?")
FIRST_SECONDS = 1_000_000_000
"""A whole number from here on is a time (2001 and later), unless the log has an event of this number."""

ROUNDED_S = 0.001
"""What :func:`iso` may leave out."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment: after the event ``seq``, or at the time ``at_s``; one of both is set."""

    seq: int | None = None
    at_s: float | None = None


def parse(text: str, *, last: int, now_s: float, numbering: Numbering) -> Moment:
    """Return the moment that a text names; BadRequestError for what is none, or is in the future."""
    if not text:
        return Moment(seq=last)
    if _WHOLE.fullmatch(text) and (
        int(text) < FIRST_SECONDS or (int(text) <= last and not numbering.skips(int(text)))
    ):
        if int(text) > last:
            raise BadRequestError(
                f"at: there is no event {text} yet\nthe newest one is {last}", field="at"
            )
        return Moment(seq=int(text))
    at_s = _seconds(text)
    if at_s > now_s:
        raise BadRequestError(
            f"at: {text} is in the future\nit is {iso(now_s)} at the gcs", field="at"
        )
    return Moment(at_s=at_s)


def _seconds(text: str) -> float:
    if _SECONDS.fullmatch(text):
        return float(text)
    try:
        # A plus in a URL is a space to those who forget to quote it.
        found = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise BadRequestError(
            f"at: {text!r} is no moment\n"
            "give a sequence number (1200), a time (2026-05-04T12:00:00Z), or seconds since the epoch",
            field="at",
        ) from None


def iso(at_s: float) -> str:
    """Return a time as people and :func:`parse` read it, to the millisecond."""
    return (
        datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
