"""Tables for notebooks, and whether one runs here; IPython is asked only where it is loaded already.

Nothing here asks the cluster: a cell that shows a value must not wait for a network.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

T = TypeVar("T")
_MAX_TEXT = 200
_MAX_ROWS = 100


def is_interactive() -> bool:
    """Return whether this process is a notebook's kernel or an IPython shell."""
    return current_shell() is not None


def current_shell() -> Any:
    """Return IPython's shell, or None if this process runs none."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def html_table(title: str, rows: Mapping[str, str], *, links: Mapping[str, str] = {}) -> str:
    """Return a small table as HTML; texts are escaped, long ones cut, empty ones left out.

    ``links`` are rows besides that lead to a URL.
    """
    cells = [(name, f"<code>{_cell(text)}</code>") for name, text in rows.items() if text]
    cells += [(name, _link(url)) for name, url in links.items()]
    body = "".join(
        f"<tr><th style='text-align:left'>{_cell(name)}</th>"
        f"<td style='text-align:left'>{cell}</td></tr>"
        for name, cell in cells
    )
    return f"<table><caption>{_cell(title)}</caption>{body}</table>"


class Records(list[T]):
    """A list that notebooks show as a table, with a row for each of the records and some of their fields."""

    def __init__(self, title: str, fields: Sequence[str], records: Iterable[T]) -> None:
        super().__init__(records)
        self._title = title
        self._fields = fields

    def _repr_html_(self) -> str:
        heads = "".join(f"<th style='text-align:left'>{_cell(name)}</th>" for name in self._fields)
        rows = "".join(f"<tr>{self._row(one)}</tr>" for one in self[:_MAX_ROWS])
        title = self._title
        if len(self) > _MAX_ROWS:
            title = f"{title}: the first {_MAX_ROWS} of {len(self)}"
        return f"<table><caption>{_cell(title)}</caption><tr>{heads}</tr>{rows}</table>"

    def _row(self, record: T) -> str:
        values = (
            record.get(name) if isinstance(record, dict) else getattr(record, name)
            for name in self._fields
        )
        texts = ("" if value is None else str(value) for value in values)
        return "".join(f"<td style='text-align:left'>{_cell(text)}</td>" for text in texts)


def shown_records(title: str, fields: Sequence[str], records: list[T]) -> list[T]:
    """Return a list of records; in a notebook one that is shown as a table."""
    return Records(title, fields, records) if is_interactive() else records


def _link(url: str) -> str:
    """Return a link to a page; what is no URL of one stays text."""
    if not url.startswith(("http://", "https://")):
        return f"<code>{_cell(url)}</code>"
    return f"<a href='{_cell(url)}' target='_blank' rel='noopener'>{_cell(url)}</a>"


def _cell(text: str) -> str:
    import html

    return html.escape(text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}\u2026")
