"""The trace simulator: small traces with known results, wrong inputs, equal outputs for equal seeds."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from stoker_scheduler.simulation.__main__ import main, simulate
from stoker_scheduler.simulation.figures import Figures, figures, usage_over_time
from stoker_scheduler.simulation.inputs import InputError, read_cluster, read_trace
from stoker_scheduler.simulation.run import What

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = """
[[nodes]]
count = 2
resources = {CPU = 4, GPU = 2, memory = "8GiB"}
"""


def made(folder: Path, trace: str, cluster: str = CLUSTER) -> tuple[Path, Path]:
    """Write both inputs; blanks in the trace are for its reader."""
    (folder / "cluster.toml").write_text(cluster)
    lines = ["".join(line.split()) for line in trace.strip().splitlines()]
    (folder / "trace.csv").write_text("\n".join(lines) + "\n")
    return folder / "cluster.toml", folder / "trace.csv"


def run(folder: Path, trace: str, cluster: str = CLUSTER, policy: str = "priority") -> Figures:
    cluster_path, trace_path = made(folder, trace, cluster)
    log, capacity = simulate(read_cluster(cluster_path), read_trace(trace_path), policy)
    return figures(log, capacity)


def test_time_goes_on_after_a_gap_in_which_nothing_runs(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        job_id, submit_s, duration_s, tasks, cpus
        a,      0,        0.05,       16,    1
        never,  100,      1,          1,     8
        """,
    )
    assert (found.jobs, found.rejected) == (2, 1)


def test_jobs_run_when_there_is_room_and_figures_say_how_long_they_waited(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        job_id, submit_s, duration_s, tasks, cpus
        a,      0,        10,         2,     4
        b,      5,        10,         1,     4
        """,
    )
    assert (found.jobs, found.tasks, found.rejected, found.makespan_s) == (2, 3, 0, 20)
    assert found.waiting_s.mean == 2.5 and found.waiting_s.most == 5
    assert found.completion_s.mean == 12.5
    assert found.utilisation["CPU"] == pytest.approx(120 / 160)
    assert found.utilisation["GPU"] == 0


def test_a_gang_starts_as_a_whole_and_what_can_never_run_is_rejected(tmp_path: Path) -> None:
    cluster, trace = made(
        tmp_path,
        """
        job_id, submit_s, duration_s, tasks, gang, gpus
        one,    0,        10,         1,     0,    1
        gang,   1,        5,          4,     1,    1
        huge,   2,        5,          5,     1,    1
        wide,   3,        5,          1,     0,    3
        """,
    )
    log, capacity = simulate(read_cluster(cluster), read_trace(trace), "priority")
    started = {one.at_s for one in log if one.job_id == "gang" and one.what is What.STARTED}
    assert started == {10.0}, "all together, when the GPU is free that it lacks"
    found = figures(log, capacity)
    assert found.rejected == 2 and found.makespan_s == 15


@pytest.mark.parametrize(
    ("policy", "first"), [("priority", "urgent"), ("fifo", "large"), ("smallest", "small")]
)
def test_a_policy_decides_who_is_next(tmp_path: Path, policy: str, first: str) -> None:
    cluster, trace = made(
        tmp_path,
        """
        job_id, submit_s, duration_s, cpus, priority
        before, 0,        10,         4,    0
        large,  1,        10,         4,    0
        urgent, 2,        10,         3,    9
        small,  3,        10,         1,    0
        """,
        "[[nodes]]\nresources = {CPU = 4}\n",
    )
    log, _ = simulate(read_cluster(cluster), read_trace(trace), policy)
    started = [one.job_id for one in log if one.what is What.STARTED]
    assert started[1] == first


@pytest.mark.parametrize(
    ("how", "shape"),
    [("preemptible", "tasks=4"), ("preemptible", "gang"), ("background", "tasks=4")],
)
def test_what_gives_way_goes_on_later_with_what_it_had(
    tmp_path: Path, how: str, shape: str
) -> None:
    tasks, gang = (2, 1) if shape == "gang" else (4, 0)
    trace = f"""
        job_id, submit_s, duration_s, tasks,   gang,   gpus,        priority, {how}
        low,    0,        100,        {tasks}, {gang}, {4 // tasks}, 0,       1
        high,   10,       20,         1,       0,      2,            5,       0
        """
    cluster_path, trace_path = made(tmp_path, trace)
    log, capacity = simulate(read_cluster(cluster_path), read_trace(trace_path), "priority")
    found = figures(log, capacity)
    lost = [one for one in log if one.what is What.PREEMPTED]
    assert len(lost) == found.preemptions == 2, "what one node runs, or the gang"
    assert {one.at_s for one in lost} == {10.0} and "preempted" in lost[0].note
    ends = {one.job_id: one.at_s for one in log if one.what is What.ENDED}
    assert ends["high"] == 30.0 and 119.0 <= ends["low"] <= 121.0, "it ran for 100 s in all"
    assert found.utilisation["GPU"] * 4 * found.makespan_s == pytest.approx(440, rel=0.01)


def test_queues_share_by_weight_and_keep_their_limits(tmp_path: Path) -> None:
    rows = [f"{queue}{i}, 0, 10, 1, {queue}, {queue}" for queue in ("b", "a") for i in range(120)]
    trace = "job_id, submit_s, duration_s, cpus, queue, user\n" + "\n".join(rows)
    cluster = "[[nodes]]\nresources = {CPU = 8}\n[queues.a]\nweight = 3\n[queues.b]\n"
    found = run(tmp_path, trace, cluster)
    a, b = found.queues
    assert a.completion_s.mean < b.completion_s.mean
    limited = run(tmp_path, trace, cluster + "limit = {CPU = 2}\n")
    assert limited.makespan_s == 600, "120 tasks of 10 s, two at a time"


def test_equal_inputs_and_seeds_give_equal_logs(tmp_path: Path) -> None:
    rows = [f"j{i}, {i % 7}, {5 + i % 11}, {1 + i % 3}, {i % 2}, {1 + i % 2}" for i in range(60)]
    trace = "job_id, submit_s, duration_s, tasks, gang, cpus\n" + "\n".join(rows)
    cluster_path, trace_path = made(tmp_path, trace)
    cluster, jobs = read_cluster(cluster_path), read_trace(trace_path)
    first, again = (simulate(cluster, jobs, "priority", seed=3, jitter=0.5)[0] for _ in range(2))
    assert first == again
    assert first != simulate(cluster, jobs, "priority", seed=4, jitter=0.5)[0]


def test_the_command_writes_a_log_from_which_its_figures_follow(tmp_path: Path) -> None:
    cluster, trace = made(
        tmp_path,
        """
        job_id, submit_s, duration_s, gpus, user
        a,      0,        10,         2,    ann
        b,      0,        10,         2,    bob
        c,      0,        10,         2,    ann
        """,
    )
    out = tmp_path / "out"
    arguments = ["--cluster", str(cluster), "--trace", str(trace), "--out", str(out)]
    told = CliRunner().invoke(main, [*arguments, "--policy", "fifo", "--policy", "fair"])
    assert told.exit_code == 0, told.output
    assert "fifo" in told.output and "fair" in told.output
    for policy in ("fifo", "fair"):
        with (out / f"{policy}.allocations.csv").open() as file:
            rows = list(csv.DictReader(file))
        ends = [float(row["at_s"]) for row in rows if row["what"] == "ended"]
        stored = json.loads((out / f"{policy}.figures.json").read_text())
        assert stored["makespan_s"] == max(ends) == 20.0
        assert stored["tasks"] == len(ends) == 3
    as_json = CliRunner().invoke(main, [*arguments, "--json"])
    assert json.loads(as_json.output)["priority"]["jobs"] == 3


@pytest.mark.parametrize(
    ("trace", "cluster", "says"),
    [
        ("job_id,submit_s\na,0", CLUSTER, "column 'duration_s' is missing"),
        ("job_id,submit_s,duration_s,gpu\na,0,1,1", CLUSTER, "did you mean 'gpus'"),
        ("job_id,submit_s,duration_s\na,x,1", CLUSTER, "trace.csv:2: submit_s='x'"),
        ("job_id,submit_s,duration_s\na,0,-1", CLUSTER, "duration_s='-1': it must be 0 or more"),
        ("job_id,submit_s,duration_s,gpus\na,0,1,1.5", CLUSTER, "GPU=1.5 is not possible"),
        ("job_id,submit_s,duration_s\na,0,1\na,0,1", CLUSTER, "'a' is there twice"),
        (
            "job_id,submit_s,duration_s,tasks,gang,background\na,0,1,2,1,1",
            CLUSTER,
            "trace.csv:2: background=1",
        ),
        ("job_id,submit_s,duration_s", CLUSTER, "there is no job"),
        ("job_id,submit_s,duration_s\na,0,1", "", "there is no node"),
        ("job_id,submit_s,duration_s\na,0,1", "[[nodes]]\ncount=1", "'resources' is missing"),
        ("job_id,submit_s,duration_s\na,0,1", "nodes = [", "cluster.toml"),
        (
            "job_id,submit_s,duration_s\na,0,1",
            CLUSTER + "[queues.a]\nparent='b'\n[queues.b]\nparent='a'\n",
            "below itself",
        ),
        ("job_id,submit_s,duration_s\na,0,1", CLUSTER + "[queues.a]\nquotas={}\n", "'quota'"),
    ],
)
def test_inputs_that_make_no_sense_name_the_place(
    tmp_path: Path, trace: str, cluster: str, says: str
) -> None:
    paths = made(tmp_path, trace, cluster)
    with pytest.raises(InputError) as caught:
        read_cluster(paths[0])
        read_trace(paths[1])
    assert says in str(caught.value)


def test_unknown_policies_and_queues_are_refused(tmp_path: Path) -> None:
    cluster, trace = made(
        tmp_path,
        "job_id, submit_s, duration_s, queue\na, 0, 1, tema",
        CLUSTER + "[queues.team]\n",
    )
    arguments = ["--cluster", str(cluster), "--trace", str(trace)]
    told = CliRunner().invoke(main, arguments)
    assert told.exit_code == 1 and "did you mean 'team'" in told.output
    told = CliRunner().invoke(main, [*arguments, "--policy", "fifi"])
    assert told.exit_code == 2 and "did you mean 'fifo'" in told.output


def test_use_over_time_is_the_mean_of_each_interval(tmp_path: Path) -> None:
    cluster, trace = made(tmp_path, "job_id, submit_s, duration_s, cpus\na, 0, 5, 2\nb, 0, 10, 1")
    log, _ = simulate(read_cluster(cluster), read_trace(trace), "priority")
    times, used = usage_over_time(log, "CPU", points=4)
    assert times == [0.0, 2.5, 5.0, 7.5] and used == pytest.approx([3, 3, 1, 1])
