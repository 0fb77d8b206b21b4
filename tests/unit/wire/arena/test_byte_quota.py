"""The count of the bytes in use."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

from stoker_wire.arena import ByteQuota
from stoker_wire.arena.extents import QUOTA

if TYPE_CHECKING:
    from pathlib import Path


def test_a_quota_whose_lock_is_stuck_goes_on(folder: Path) -> None:
    quota = ByteQuota(folder / QUOTA)
    with open(folder / QUOTA) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert quota.take(10)
    assert quota.used_bytes == 10
    quota.recount(5, before_bytes=11)
    assert quota.used_bytes == 10, "it changed during the count"
    quota.recount(5, before_bytes=10)
    assert quota.used_bytes == 5
