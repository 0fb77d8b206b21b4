"""Node filters on a running cluster: on tasks, groups and queues, explained, and moved by slow ranks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from stoker_wire.messages.work import Job, ReportSlowRank, SlowRank
from tests.e2e._cluster import driver, head, http, line_of, run_driver
from tests.e2e.scheduling.test_queues import refused, stoker_cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    labels = {"rack": "r7"}
    with head(tmp_path_factory.mktemp("f"), num_cpus=4, labels=labels) as made:
        yield made


def test_filters_admit_refuse_and_explain(cluster: LocalCluster) -> None:
    told = run_driver(
        cluster,
        """
        import stoker
        stoker.init()

        @stoker.remote(node_filter="labels.rack = 'r7' and free.cpu >= 2")
        def f():
            return "ran"

        print(stoker.get(f.remote(), timeout=60))
        group = stoker.placement_group([{"CPU": 1}], node_filter="labels.rack like 'r%'")
        assert group.wait(60)
        inside = stoker.PlacementGroupSchedulingStrategy(group)
        try:
            f.options(scheduling_strategy=inside)
        except ValueError as error:
            print(error)
        group = stoker.placement_group([{"CPU": 1}], node_filter="labels.rack = 'r1'")
        assert not group.wait(1)
        try:
            f.options(node_filter="labels.rack !! 'r7'")
        except ValueError as error:
            print(error)
        try:
            stoker.get(f.options(node_filter="labels.rack != 'r7'").remote(), timeout=60)
        except stoker.exceptions.InfeasibleError as error:
            print(error)
        """,
        STOKER_INFEASIBLE_GRACE_S="0.5",
    )
    assert "ran" in told.stdout, told.stderr
    assert "at position 13" in told.stdout
    assert "has no meaning in a placement group" in told.stdout
    assert "labels.rack != 'r7' is false: rack is r7" in told.stdout


def test_a_filter_of_a_queue_holds_for_all_in_it(cluster: LocalCluster) -> None:
    made = stoker_cli(cluster, "queue", "create", "away", "--node-filter", "slow_ranks > 0")
    assert made["node_filter"] == "slow_ranks > 0"
    assert "at position 1" in refused(cluster, "queue", "set", "away", "--node-filter", "rack")
    program = """
        import stoker
        stoker.init(queue="away")

        @stoker.remote
        def f():
            return 1

        waits = f.remote()
        assert not stoker.wait([waits], timeout=1)[0]
        print("waits", stoker.get_runtime_context().get_job_id(), flush=True)
        print("ran", stoker.get(waits, timeout=60), flush=True)
    """
    with driver(cluster, program) as process:
        job_id = line_of(process, "waits")
        why = json.dumps(stoker_cli(cluster, "explain", job_id))
        assert "node_filter of queue 'away': slow_ranks > 0 is false: slow_ranks is 0" in why
        body = ReportSlowRank(
            node_id=cluster.info.node_id, rank=0, ratio=2.0, since_s=time.time() - 60
        )
        http(cluster).call("POST", f"/v1/jobs/{job_id}/slow-ranks", body, reply=SlowRank)
        assert line_of(process, "ran") == "1"
    assert http(cluster).call("GET", f"/v1/jobs/{job_id}", reply=Job).queue == "away"
