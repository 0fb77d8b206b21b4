"""Quotas of rows that many may add to: the keys of a namespace, the blobs of a kind.

What a group holds is counted in SQL at times, and what is added since is added up here, so that a change
costs no count. Replicas that add at the same time may exceed a quota by what they add in a minute.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker_wire.errors import PayloadTooLargeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stoker_gcs.state.records import StateStore
    from stoker_gcs.state.schema import Table

COUNT_EVERY_S = 60.0
_AGAIN_S = 0.1
"""The least pause between two counts of a group that seems to be full."""
_GROUPS = 10_000


@dataclass(slots=True)
class _Use:
    counted_s: float
    count: int
    nbytes: int


class Quota:
    """The limits of each group of rows of ``table`` that have the same value in ``column``; 0: none.

    ``fix`` says what its user can do, in the error.
    """

    def __init__(
        self,
        state: StateStore,
        table: Table,
        column: str,
        *,
        max_count: int,
        max_bytes: int,
        fix: str,
    ) -> None:
        self._state = state
        self._table = table
        self._column = column
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._fix = fix
        self._uses: dict[str, _Use] = {}

    async def admit(
        self, what: str, group: str, nbytes: int, held: Callable[[], Awaitable[int | None]]
    ) -> None:
        """Raise PayloadTooLargeError if a group has no room for a row of ``nbytes``.

        ``held`` returns the size of the row that it replaces, None if there is none.
        """
        now_s = time.monotonic()
        use = self._uses.get(group)
        age_s = COUNT_EVERY_S if use is None else now_s - use.counted_s
        if (
            use is None
            or age_s >= COUNT_EVERY_S
            or (self._is_over(use, nbytes) and age_s > _AGAIN_S)
        ):
            where = {self._column: group}
            count, total = await self._state.store.summed(self._table, "nbytes", where)
            use = _Use(now_s, count, total)
            while len(self._uses) >= _GROUPS:
                self._uses.pop(next(iter(self._uses)))
            self._uses[group] = use
        count = 1
        if self._is_over(use, nbytes) and (known := await held()) is not None:
            count, nbytes = 0, nbytes - known
        if self._is_over(use, nbytes, count):
            raise PayloadTooLargeError(
                f"{what} is full\n"
                f"it has {use.count} of {self._max_count or 'any number'} and {use.nbytes} bytes of "
                f"{self._max_bytes or 'any number'}: {self._fix}"
            )
        use.count += count
        use.nbytes += nbytes

    def _is_over(self, use: _Use, nbytes: int, count: int = 1) -> bool:
        many = bool(self._max_count) and count > 0 and use.count + count > self._max_count
        large = bool(self._max_bytes) and nbytes > 0 and use.nbytes + nbytes > self._max_bytes
        return many or large
