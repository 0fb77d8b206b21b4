"""HTML made of tags: text is escaped unless it is markup already, so nothing of a user's can become a tag."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import click

from stoker.runtime.process.terminal import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Markup(str):
    """Text that is HTML, and goes into a page as it is."""

    __slots__ = ()


def tag(name: str, *content: str | Markup, **attributes: str | float) -> Markup:
    """Return an element; an attribute whose name Python has taken ends in ``_``, one dash is a ``_``."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{joined(content)}</{name}>")


def joined(content: Iterable[str | Markup]) -> Markup:
    """Return several contents as one."""
    return Markup("".join(one if isinstance(one, Markup) else escaped(one) for one in content))


def escaped(text: str) -> Markup:
    """Return a text of anybody as markup: escaped, without colours and control characters."""
    return Markup(html.escape(click.unstyle(clean(text))))


def table(headings: Sequence[str], rows: Iterable[Sequence[str | Markup]]) -> Markup:
    """Return a table."""
    head = tag("tr", *(tag("th", text) for text in headings))
    body = (tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return tag("div", tag("table", head, *body), class_="wide")
