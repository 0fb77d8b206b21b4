"""Explanations and plans as a user sees them: the command line, and a get that runs out of time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e._cluster import driver, environment, head, http, line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

PROGRAM = """
    import stoker, time
    stoker.init(queue="team")

    @stoker.remote(num_cpus=3)
    def late():
        yield "it has its lease"
        time.sleep(1000)

    @stoker.remote(num_cpus=2)
    def behind():
        return 1

    held = late.remote()
    assert stoker.wait([held], timeout=60)[0], "late does not start"
    waits = behind.remote()
    for _ in range(20):
        try:
            stoker.get(waits, timeout=1)
        except stoker.exceptions.GetTimeoutError as error:
            text = str(error)
        if "late" in text:
            break
    print("told", text.replace("\\n", " | "), flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with head(tmp_path_factory.mktemp("x"), num_cpus=4, resources={"ssd": 1}) as made:
        http(made).call("POST", "/v1/queues", {"name": "team", "quota": {"CPU": 2.0}})
        yield made


@pytest.fixture(scope="module")
def told(cluster: LocalCluster) -> Iterator[str]:
    """What a get said that ran out of time, while the task that it waits for still waits."""
    with driver(cluster, PROGRAM) as process:
        yield line_of(process, "told")


def stoker_cli(cluster: LocalCluster, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stoker.cli", *arguments],
        env=environment(cluster),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def stoker_json(cluster: LocalCluster, *arguments: str) -> Any:
    return json.loads(stoker_cli(cluster, *arguments, "--json"))


def test_a_get_that_runs_out_of_time_says_what_would_let_it_start(told: str) -> None:
    assert "get() waited 1 s for 1 of 1 objects" in told
    assert re.search(
        r"why: behind: needs 2 CPU, 1 CPU of 4 CPU is free \(n_\w+\); it starts if 3 CPU", told
    )
    assert "is freed, when task late ends" in told
    assert re.search(r"more: stoker explain t_\w+", told)


def test_explain_names_what_binds_what_helps_and_who_has_it(
    cluster: LocalCluster, told: str
) -> None:
    task_id = re.findall(r"t_\w+", told)[-1]
    shown = stoker_cli(cluster, "explain", task_id).splitlines()
    assert shown[0].startswith(f"{task_id} is QUEUED") and shown[0].endswith("(queue)")
    # Its turn may have come to have the lease asked back.
    assert re.match("  (capacity: n_|preemption: 1 lease)", shown[1])
    order = ["to change that: it starts if", "Who holds what it wants", "CPU 3", "busy"]
    found = [next(i for i, line in enumerate(shown) if part in line) for part in order]
    assert found == sorted(found)
    record = stoker_json(cluster, "explain", task_id)
    assert record["constraint"]["kind"] in ("capacity", "preemption")
    (holder,) = record["holders"]
    assert holder["name"] == "late" and holder["resources"] == {"CPU": 3.0}
    assert [one["lease_ids"] for one in record["remedies"]] == [[holder["lease_id"]], []]


def test_explain_of_a_queue_says_how_it_stands(cluster: LocalCluster, told: str) -> None:
    shown = stoker_cli(cluster, "explain", "team")
    for words in ("queue team", "quota: CPU 2", "borrowed: CPU 1", "1 request", "behind"):
        assert words in shown
    record = stoker_json(cluster, "explain", "team")
    assert record["borrowed"] == {"CPU": 1.0} and record["waiting_count"] == 1


def test_a_plan_says_where_work_would_go_and_starts_nothing(
    cluster: LocalCluster, told: str
) -> None:
    (one,) = stoker_json(cluster, "plan", "--resources", "ssd=1")["placements"]
    assert one["outcome"] == "starts" and one["node_id"].startswith("n_")
    waits = stoker_cli(cluster, "plan", "--resources", "CPU=4", "--gang", "PACK")
    assert "gang of 1 waits" in waits and "it starts if" in waits
    assert [lease["name"] for lease in stoker_json(cluster, "list", "leases")] == ["late"]
