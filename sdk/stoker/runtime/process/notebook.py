"""Tables for notebooks, and whether one runs here; IPython is asked only where it is loaded already.

Nothing here asks the cluster: a cell that shows a value must not wait for a network.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_TEXT = 200


def is_interactive() -> bool:
    """Return whether this process is a notebook's kernel or an IPython shell."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and get_ipython() is not None


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """Return a small table as HTML; texts are escaped, long ones cut, empty ones left out."""
    body = "".join(
        f"<tr><th style='text-align:left'>{_cell(name)}</th>"
        f"<td style='text-align:left'><code>{_cell(text)}</code></td></tr>"
        for name, text in rows.items()
        if text
    )
    return f"<table><caption>{_cell(title)}</caption>{body}</table>"


def _cell(text: str) -> str:
    import html

    return html.escape(text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}\u2026")
