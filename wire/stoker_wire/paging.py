"""Pages of lists that are held in memory; SQL-backed lists page by their own keys.

Used by handlers of list routes. A cursor is the sort key of the last item shown: it stays right
while items come and go, which an offset would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from stoker_wire.messages.control import ListQuery, Page

__all__ = ("ListQuery", "Page", "page_of")

T = TypeVar("T")


def page_of(
    items: Iterable[T], query: ListQuery, *, key: Callable[[T], str], seq: int = 0
) -> Page[T]:
    """Return the page of ``items``, ordered by ``key`` (unique per item), that ``query`` asks for."""
    ordered = sorted(items, key=key)
    if query.cursor:
        ordered = [item for item in ordered if key(item) > query.cursor]
    shown = ordered[: query.limit]
    more = len(ordered) > len(shown)
    return Page(items=tuple(shown), next_cursor=key(shown[-1]) if more else "", seq=seq)
