"""An extender of kube-scheduler's beside a running cluster: it admits tasks, or says why not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e._cluster import driver, head, line_of
from tests.e2e.scheduling.test_queues import stoker_cli
from tests.unit.scheduler.extender_server import ExtenderServer, serve_in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster


@pytest.fixture
def extender() -> Iterator[ExtenderServer]:
    with serve_in_thread() as server:
        yield server


@pytest.fixture
def cluster(
    tmp_path: Path, extender: ExtenderServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalCluster]:
    file = tmp_path / "extenders.yaml"
    file.write_text(f"extenders:\n- urlPrefix: {extender.url}\n  filterVerb: filter\n")
    monkeypatch.setenv("STOKER_EXTENDERS", str(file))
    monkeypatch.setenv("STOKER_EXTENDER_ANSWER_S", "0.5")
    with head(tmp_path, num_cpus=2) as made:
        yield made


def test_an_extender_holds_tasks_back_and_lets_them_go(
    cluster: LocalCluster, extender: ExtenderServer
) -> None:
    extender.refused = {cluster.info.node_id: "no licence left"}
    program = """
        import stoker
        stoker.init()

        @stoker.remote
        def f():
            return 1

        waits = f.remote()
        assert not stoker.wait([waits], timeout=1)[0]
        print("waits", stoker.get_runtime_context().get_job_id(), flush=True)
        print("ran", stoker.get(waits, timeout=60), flush=True)
    """
    with driver(cluster, program) as process:
        why = json.dumps(stoker_cli(cluster, "explain", line_of(process, "waits")))
        assert f"extender {extender.url}: no licence left" in why
        extender.refused = {}
        assert line_of(process, "ran") == "1"
    pods = [args["Pod"] for _, args in extender.calls]
    assert all(pod["spec"]["schedulerName"] == "stoker" for pod in pods)
