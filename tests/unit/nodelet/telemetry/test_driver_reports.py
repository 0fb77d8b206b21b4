"""A driver's exit as the end of its job."""

from __future__ import annotations

import pytest

from stoker_nodelet.telemetry import driver_reports
from stoker_nodelet.telemetry.driver_reports import (
    DriverReports,
    exit_code_of,
    final_state,
    message_of,
)
from stoker_wire.errors import ConflictError, ProtocolError, StokerError, UnavailableError
from stoker_wire.messages.cluster import WorkerExit
from stoker_wire.messages.work import JobState


def exit_of(**facts: object) -> WorkerExit:
    return WorkerExit(worker_id="w", node_id="n", **facts)  # type: ignore[arg-type]


def test_a_drivers_exit_is_the_jobs_end() -> None:
    assert final_state(exit_of(exit_code=0)) is JobState.SUCCEEDED
    assert final_state(exit_of(exit_code=1)) is JobState.FAILED
    assert final_state(exit_of(signal=9)) is JobState.FAILED
    assert final_state(exit_of(exit_code=0, expected=True)) is JobState.STOPPED
    assert message_of(exit_of(exit_code=0)) == ""
    failed = exit_of(exit_code=2, cause="exited with code 2", last_log_lines=("a", "b"))
    assert message_of(failed) == "the driver exited with code 2\na\nb"


def test_a_driver_that_a_signal_killed_has_its_number_as_code() -> None:
    assert exit_code_of(exit_of(exit_code=3)) == 3
    assert exit_code_of(exit_of(signal=9)) == -9
    assert exit_code_of(exit_of(signal=15, expected=True)) is None


@pytest.mark.parametrize(
    ("errors", "calls"),
    [
        ([UnavailableError("away"), ProtocolError("two minor versions apart")], 3),
        ([ConflictError("its job has ended otherwise"), UnavailableError("never reached")], 1),
    ],
)
async def test_an_end_is_told_until_the_gcs_has_decided_on_it(
    errors: list[StokerError], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_reports, "_AWAY_S", 0.0)
    told: list[str] = []

    class Gcs:
        async def call(self, method: str, path: str, body: object) -> None:
            told.append(path)
            if errors:
                raise errors.pop(0)

    await DriverReports(Gcs(), None)._report(exit_of(exit_code=0, job_id="job_1"), 0)  # type: ignore[arg-type]
    assert told == ["/v1/jobs/job_1/finish"] * calls
