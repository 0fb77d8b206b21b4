"""The words about a backup on the terminal: how far it is, and what it has."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from stoker_migrations.backup import Manifest

_SHOW_S = 0.2
_CLEAR = "\r\x1b[K"


def progress(as_json: bool) -> Callable[[str, int], None] | None:
    """Return what shows how far it is, where somebody looks."""
    if as_json or not sys.stderr.isatty():
        return None
    shown_s = 0.0

    def show(table: str, rows: int) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s > _SHOW_S:
            shown_s = now_s
            sys.stderr.write(f"{_CLEAR}{table}: {rows:,} rows")
            sys.stderr.flush()

    return show


def report(manifest: Manifest, what: str, *, as_json: bool) -> None:
    """Print what a backup has: as JSON, or a line for each table with rows."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(manifest._asdict()).decode() + "\n")
        return
    if sys.stderr.isatty():
        sys.stderr.write(_CLEAR)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.at_s))
    sys.stdout.write(f"{what}, as of event {manifest.seq} at {at}\n")
    for table, rows in manifest.rows.items():
        if rows:
            sys.stdout.write(f"  {table:18} {rows:,}\n")
