"""Garbage collection as long-running services want it."""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 10, 100)
"""After so many new objects the young ones are looked at, and after so many such looks those that survived
one, or two. Python's own 700, 10 and 10 cost the scheduler up to a tenth, as it makes many small objects and
hardly any cycles; and one look at all that a long queue holds stops it for a second."""


def settle() -> None:
    """Leave what exists now out of all collections, as it stays; collect new objects less often."""
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
