"""Until when tasks of the history are not whole, as retention has removed some that had ended by then.

Tasks are in no event, so what was removed is missed at every time before; a row of ``meta`` says which.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stoker_gcs.state.schema import META
from stoker_gcs.store.changes import Insert, Update

if TYPE_CHECKING:
    from stoker_gcs.store.protocol import Store

REMOVED_UNTIL = "tasks_removed_until_s"
"""The row of ``meta`` that has when the last one of those that were removed had ended."""


async def whole_since(store: Store) -> float:
    """Return the time from which on all tasks that had not ended are in the history."""
    row = await store.get(META, {"name": REMOVED_UNTIL})
    return -math.inf if row is None else float(row["value"])


async def removed_until(store: Store, ended_at_s: float) -> tuple[Insert | Update, ...]:
    """Return what belongs into the change that removes tasks which had ended by then; it only rises."""
    known_s = await whole_since(store)
    if ended_at_s <= known_s:
        return ()
    key, values = {"name": REMOVED_UNTIL}, {"value": repr(ended_at_s)}
    if known_s == -math.inf:
        return (Insert(META, {**key, **values}),)
    return (Update(META, key, values, expect={"value": repr(known_s)}),)
