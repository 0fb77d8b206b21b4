"""Pages cover a list once, also while it changes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from stoker_wire.http.paging import ListQuery, page_of

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("limit", [1, 3, 10, 1000])
def test_pages_cover_everything_once_in_order(limit: int, seed: int) -> None:
    items = [f"n_{number:03}" for number in range(10)]
    random.Random(seed).shuffle(items)
    key: Callable[[str], str] = str
    seen, cursor = [], ""
    while True:
        page = page_of(items, ListQuery(limit=limit, cursor=cursor), key=key, seq=7)
        assert page.seq == 7
        seen += page.items
        cursor = page.next_cursor
        if not cursor:
            break
    assert seen == sorted(items)


def test_a_cursor_stays_right_when_items_go() -> None:
    first = page_of("abcdef", ListQuery(limit=3), key=str)
    assert page_of("adef", ListQuery(limit=3, cursor=first.next_cursor), key=str).items == (
        "d",
        "e",
        "f",
    )
