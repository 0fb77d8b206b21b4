"""Texts of the formats that the API's schemas name, for Schemathesis to make cases of."""

from __future__ import annotations

import schemathesis
from hypothesis import strategies as st

from tests.fuzz.decoders import FILTERS

_TIMES = ("", "0", "12", "1", "2026-05-04T12:00:00Z", "1700000000.5", "2020-01-01")
_CRONS = ("0 0 1 1 *", "*/5 * * * *", "30 3 * * 1-5", "0 0 29 2 *")
_ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata")


def register() -> None:
    """Have Schemathesis know the formats."""
    for name, texts in (
        ("node-filter", ("", *FILTERS)),
        ("cron", _CRONS),
        ("time-zone", _ZONES),
        ("moment", _TIMES),
    ):
        schemathesis.openapi.format(name, st.sampled_from(texts))
