"""What a controller takes for the cause of the failures of a gang."""

from __future__ import annotations

from stoker_train.sharded.controller.driver import _cause
from stoker_train.sharded.rank.reports import Died, Failed

LOST = Failed(0, 1, "lost", "RuntimeError: Connection closed by peer", "step 3")
LOOP = Failed(1, 1, "loop", "ValueError: mine", "step 3")
DIED = Died(2, 1, "its process got signal 9")


def test_a_death_is_the_cause_then_a_loops_own_error_then_who_waited_first() -> None:
    assert _cause([LOST, LOOP, DIED]) is DIED
    assert _cause([LOST, LOOP]) is LOOP
    other = Failed(3, 1, "lost", "RuntimeError: Timed out", "step 3")
    assert _cause([LOST, other]) is LOST
