"""What ``stoker summary`` adds up by itself, without a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.cli.views.summary import actors_by_class, objects_by_place, print_functions
from stoker_wire.http.dashboard.figures import Durations, FunctionSummary

if TYPE_CHECKING:
    import pytest


def test_actors_are_counted_by_class_state_and_cause_of_death() -> None:
    dead = {
        "class_name": "A",
        "state": "DEAD",
        "restarts": 2,
        "death_cause": {"code": "out_of_memory"},
    }
    alive = {
        "class_name": "A",
        "state": "ALIVE",
        "restarts": 1,
        "death_cause": {"code": "worker_died"},
    }
    first, second = actors_by_class([{"class_name": "B", "state": "PENDING"}, dead, alive])
    assert (first["class_name"], first["states"], first["restarts"]) == (
        "A",
        {"DEAD": 1, "ALIVE": 1},
        3,
    )
    assert first["deaths"] == {"out_of_memory": 1}, "of one that lives again its last death is none"
    assert (second["class_name"], second["count"]) == ("B", 1)


def test_objects_are_added_up_by_node_and_job() -> None:
    small = {"node_id": "n_a", "job_id": "job_1", "nbytes": 5}
    large = {"node_id": "n_b", "job_id": "job_1", "nbytes": 50, "spilled": True, "copy_of": "n_a"}
    first, second = objects_by_place([small, large, small])
    assert (first["node_id"], first["nbytes"], first["spilled_nbytes"], first["copies"]) == (
        "n_b",
        50,
        50,
        1,
    )
    assert (second["objects"], second["nbytes"], second["largest_nbytes"]) == (2, 10, 5)


def test_functions_have_percentiles_and_causes(capsys: pytest.CaptureFixture[str]) -> None:
    none, some = Durations(), Durations(count=3, p50=1.0, p90=2.0, p99=65.0)
    counts = {"worker_died": 1, "task_failed": 3}
    print_functions(
        [
            FunctionSummary(key="f", count=9, states={"FINISHED": 5, "FAILED": 4}, failures=counts,
                            run_s=some, wait_s=none),
            FunctionSummary(key="g", count=1, states={"QUEUED": 1}, failures={}, run_s=none, wait_s=none),
        ]
    )  # fmt: skip
    head, f, g = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["FUNCTION", "QUEUED", "FINISHED", "FAILED"]
    assert f.split() == [
        "f",
        "0",
        "5",
        "4",
        "1.00s",
        "2.00s",
        "1m05s",
        "3",
        "task_failed,",
        "1",
        "worker_died",
    ]
    assert g.split() == ["g", "1", "0", "0"]


def test_functions_show_what_they_held(capsys: pytest.CaptureFixture[str]) -> None:
    none = Durations()
    held = FunctionSummary(key="f", count=1, states={"FINISHED": 1}, failures={}, run_s=none,
                           wait_s=none, cpu_s=7200.0, gpu_s=4500.0)  # fmt: skip
    print_functions([held])
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[-3:-1] == ["GPU-HOURS", "CPU-HOURS"] and line.split()[-2:] == ["1.25", "2"]
