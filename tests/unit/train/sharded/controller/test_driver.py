"""A controller and the failures of its gang: their cause, and what comes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from stoker.train import Checkpoint, Failure, Strategy
from stoker_train.sharded.controller.driver import Controller, _cause
from stoker_train.sharded.options import ShardedResult
from stoker_train.sharded.rank.reports import Committed, Died, Failed, Returned
from stoker_train.sharded.records import FencedRecords, Spec

LOST = Failed(0, 1, "lost", "RuntimeError: Connection closed by peer", "step 3")
LOOP = Failed(1, 1, "loop", "ValueError: mine", "step 3")
DIED = Died(2, 1, "its process got signal 9")


@dataclass
class Kept:
    """Records that keep the result alone."""

    attempt: int = 0
    job_id: str = "job_1"
    result: ShardedResult | None = None

    def write_result(self, result: ShardedResult, progress: dict[str, Any]) -> None:
        """Keep it."""
        self.result = result

    def drop_work(self) -> None:
        """Have none."""


class NoGang:
    """A gang whose ranks do nothing."""

    def kill_all(self) -> None:
        """End none."""

    def tell(self, rank: int, method: str, what: str) -> None:
        """Tell nobody."""


def test_a_death_is_the_cause_then_a_loops_own_error_then_who_waited_first() -> None:
    assert _cause([LOST, LOOP, DIED]) is DIED
    assert _cause([LOST, LOOP]) is LOOP
    other = Failed(3, 1, "lost", "RuntimeError: Timed out", "step 3")
    assert _cause([LOST, other]) is LOST


@pytest.fixture
def controller() -> Controller:
    """One whose gang, number 1, trains."""
    spec = Spec(
        "one", b"", b"", Strategy(data=2), (), {"CPU": 1.0}, Checkpoint("folder"), Failure(), 0
    )
    made = Controller(cast("FencedRecords", Kept()), spec)
    made._gang, made._gang_number = cast("Any", NoGang()), 1
    made._progress |= {"phase": "RUNNING", "ranks": [{"node": "n_1"}] * 2, "step": 9}
    return made


def ended(controller: Controller) -> ShardedResult:
    controller._finish()
    result = cast("Kept", controller._records).result
    assert result is not None
    return result


def test_a_stop_outlives_the_gang_that_was_asked(controller: Controller) -> None:
    controller._take(Committed(0, 1, 8))
    controller._take({"what": "stop"})
    controller._take(Died(1, 1, "signal 9"))
    controller._judge()
    result = ended(controller)
    assert (result.error, result.steps) == ("", 8)


def test_a_controller_that_takes_over_stops_where_the_one_before_was_asked_to() -> None:
    known = {"committed": 8, "stops": True}
    spec = Spec("one", b"", b"", Strategy(), (), {}, Checkpoint("folder"), Failure(), 0)
    kept = Kept(attempt=2)
    assert Controller(cast("FencedRecords", kept), spec, known).run()
    assert kept.result is not None
    assert (kept.result.error, kept.result.steps) == ("", 8)


def test_who_has_returned_may_end(controller: Controller) -> None:
    controller._take(Returned(1, 1, 9))
    controller._take(Died(1, 1, "signal 9"))
    controller._look()
    assert controller._progress["phase"] == "RUNNING"
    controller._take(Returned(0, 1, 9))
    assert not ended(controller).error


def test_another_training_in_the_same_folder_ends_this_one(controller: Controller) -> None:
    where = "step 9, saving a checkpoint"
    controller._take(Failed(0, 1, "fenced", "FencedError: attempt 1 writes no more", where))
    controller._judge()
    result = ended(controller)
    assert result.error_kind == "fenced"
    assert "another training has taken its checkpoints over" in result.error
