"""The timeline: complete JSON in Chrome's format, a row for each tensor."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

import pytest

from stoker.exceptions import BadRequestError
from stoker_train.collective.timeline import Timeline

if TYPE_CHECKING:
    from pathlib import Path


def test_phases_lie_in_the_row_of_their_tensor(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "rank{rank}.json", 3, "group 'g'")
    timeline.record("grad", "NEGOTIATE", 2_000, 5_000, {"last_rank": 1})
    timeline.record("bias", "EXCHANGE", 5_000, 4_000)
    timeline.record("grad", "EXCHANGE", 5_000, 9_000)
    timeline.close()
    timeline.close()
    timeline.record("late", "EXCHANGE", 0, 1)
    events = [one for one in json.loads((tmp_path / "rank3.json").read_text()) if one]
    rows = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    phases = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert phases == [
        (rows["grad"], "NEGOTIATE", 2.0, 3.0),
        (rows["bias"], "EXCHANGE", 5.0, 0.0),
        (rows["grad"], "EXCHANGE", 5.0, 4.0),
    ]
    assert {e["pid"] for e in events} == {3}
    assert "group 'g' rank 3" in str(events)


def test_threads_may_record_at_once(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.json", 0, "g")

    def record() -> None:
        for number in range(700):
            timeline.record(f"row {number % 5}", "EXCHANGE", number, number + 1)

    threads = [threading.Thread(target=record) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    events = json.loads((tmp_path / "t.json").read_text())
    assert sum(e.get("ph") == "X" for e in events) == 2100


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="the timeline cannot be written to"):
        Timeline(tmp_path / "nowhere" / "t.json", 0, "g")
