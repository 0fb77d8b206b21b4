"""A driver's exit as the end of its job."""

from __future__ import annotations

from stoker_nodelet.telemetry.driver_reports import final_state, message_of
from stoker_wire.messages.cluster import WorkerExit
from stoker_wire.messages.work import JobState


def test_a_drivers_exit_is_the_jobs_end() -> None:
    def exit_of(**facts: object) -> WorkerExit:
        return WorkerExit(worker_id="w", node_id="n", **facts)  # type: ignore[arg-type]

    assert final_state(exit_of(exit_code=0)) is JobState.SUCCEEDED
    assert final_state(exit_of(exit_code=1)) is JobState.FAILED
    assert final_state(exit_of(signal=9)) is JobState.FAILED
    assert final_state(exit_of(exit_code=0, expected=True)) is JobState.STOPPED
    assert message_of(exit_of(exit_code=0)) == ""
    failed = exit_of(exit_code=2, cause="exited with code 2", last_log_lines=("a", "b"))
    assert message_of(failed) == "the driver exited with code 2\na\nb"
