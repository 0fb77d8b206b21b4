"""Pages of lists in memory; lists in SQL page by their own keys.

Used by handlers of list routes. A cursor is the sort key of the last item shown: it stays right
while items come and go, which an offset would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from stoker_wire.errors import BadRequestError
from stoker_wire.messages.control import COUNTED, ListQuery, Order, Page, Sort

__all__ = ("ListQuery", "Page", "bad_cursor", "page_of")

T = TypeVar("T")


def page_of(
    items: Iterable[T],
    query: ListQuery,
    *,
    key: Callable[[T], str],
    created: Callable[[T], float] | None = None,
    seq: int = 0,
) -> Page[T]:
    """Return the page of ``items`` that ``query`` asks for.

    ``key`` is unique per item; ``created`` is when an item came to be (without it, the order of the
    keys is the order in which the items came).
    """
    by_time = created if query.sort is Sort.CREATED else None

    def rank(item: T) -> tuple[float, str]:
        return (0.0 if by_time is None else by_time(item), key(item))

    newest_first = query.order is Order.DESC
    ordered = sorted(items, key=rank, reverse=newest_first)
    total = min(len(ordered), COUNTED) if query.count else None
    exact = len(ordered) <= COUNTED
    if query.cursor:
        last = _parse(query.cursor) if by_time is not None else (0.0, query.cursor)
        ordered = [
            item for item in ordered if (rank(item) < last if newest_first else rank(item) > last)
        ]
    shown = ordered[: query.limit]
    cursor = ""
    if len(ordered) > len(shown):
        at_s, name = rank(shown[-1])
        cursor = name if by_time is None else f"{at_s!r} {name}"
    return Page(items=tuple(shown), next_cursor=cursor, seq=seq, total=total, total_exact=exact)


def _parse(cursor: str) -> tuple[float, str]:
    at_s, _, name = cursor.partition(" ")
    try:
        return float(at_s), name
    except ValueError:
        raise bad_cursor(cursor) from None


def bad_cursor(cursor: str) -> BadRequestError:
    """Return the error for a cursor that is not one of this list in this order."""
    return BadRequestError(
        f"cursor: {cursor!r} is none of this list in this order\n"
        "send the next_cursor of a page that was asked for with the same sort and order",
        field="cursor",
    )
