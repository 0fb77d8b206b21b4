"""``/metrics`` of all services: what the catalogue says, and what work leaves there."""

from __future__ import annotations

import contextlib
import http.client as http_client
import shutil
import subprocess
import urllib.error
import urllib.parse
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker.local.cluster import spawn_node
from stoker.runtime.net.http import HttpClient
from stoker_wire.messages.cluster import Node
from stoker_wire.messages.control import Page
from stoker_wire.process.metrics.catalogue import METRICS, SERVICES, MetricType
from tests.e2e._cluster import http, session_root
from tests.e2e.http._metrics import monitored_cluster, read, token_of, urls_of, work
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.launch import LocalCluster

WAIT_S = 40.0
PROCESS = "process_"
"""The names that every program of the world has, not Stoker's."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with monitored_cluster(tmp_path_factory.mktemp("s")) as made:
        yield made


@pytest.fixture(scope="module")
def job(cluster: LocalCluster) -> str:
    return work(cluster)


def samples(cluster: LocalCluster, service: str, name: str) -> dict[frozenset[str], float]:
    """The samples of a name, by the values of their labels."""
    text = read(urls_of(cluster)[service], cluster.info.token)
    return {
        frozenset(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_shows_its_part_of_the_catalogue(
    cluster: LocalCluster, job: str, service: str
) -> None:
    text = read(urls_of(cluster)[service], cluster.info.token)
    lines = text.splitlines()
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE "))
    helps = {line.split()[2] for line in lines if line.startswith("# HELP ")}
    wanted = {spec.name: spec for spec in METRICS if service in spec.services}
    own = {name for name in types if not name.startswith(PROCESS)}
    lacking = {name for name, spec in wanted.items() if not spec.optional} - own
    assert own <= wanted.keys() and not lacking
    assert helps == types.keys()
    assert {name: types[name] for name in own} == {name: wanted[name].exposed_type for name in own}
    found = {family.name: family for family in text_string_to_metric_families(text)}
    for name in own:
        family = found[name.removesuffix("_total")]
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels <= {*wanted[name].labels, "le"}, name
        if wanted[name].type is MetricType.HISTOGRAM and family.samples:
            assert any(sample.labels.get("le") == "+Inf" for sample in family.samples)


@pytest.mark.parametrize("service", SERVICES)
def test_promtool_has_nothing_to_say(cluster: LocalCluster, job: str, service: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool: install Debian's package prometheus")
    text = read(urls_of(cluster)[service], cluster.info.token)
    told = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout + told.stderr) == (0, "")


def test_tasks_are_counted_by_function_and_state(cluster: LocalCluster, job: str) -> None:
    def ended() -> dict[frozenset[str], float]:
        found = samples(cluster, "gcs", "stoker_tasks_ended_total")
        return found if frozenset(("wrong", "FAILED")) in found else {}

    found = until(ended, WAIT_S, "the ends are counted")
    assert found[frozenset(("square", "FINISHED"))] == 20
    assert found[frozenset(("wrong", "FAILED"))] == 1
    assert samples(cluster, "gcs", "stoker_task_failures_total") == {frozenset(["task_failed"]): 1}
    took = samples(cluster, "gcs", "stoker_task_run_seconds_sum")
    assert took[frozenset(["spin"])] >= 1.0 > took[frozenset(["square"])]
    assert samples(cluster, "gcs", "stoker_task_wait_seconds_count")[frozenset(["square"])] == 20


def test_a_job_is_charged_with_the_cpus_and_gpus_that_it_took(
    cluster: LocalCluster, job: str
) -> None:
    def charged(name: str) -> float:
        return samples(cluster, "nodelet", f"stoker_job_{name}_seconds_total").get(
            frozenset([job]), 0.0
        )

    until(lambda: charged("cpu") >= 1.0, WAIT_S, "its CPU time is known")
    assert charged("cpu") < 60
    assert 0.4 <= charged("gpu") < 60


def test_leases_workers_and_resources_are_known(cluster: LocalCluster, job: str) -> None:
    granted = samples(cluster, "scheduler", "stoker_scheduler_leases_granted_total")[frozenset()]
    waits = samples(cluster, "scheduler", "stoker_scheduler_lease_wait_seconds_count")
    assert granted >= 2 and waits == {frozenset(): granted}
    capacity = samples(cluster, "scheduler", "stoker_scheduler_resource_capacity")
    assert (capacity[frozenset(["CPU"])], capacity[frozenset(["GPU"])]) == (2, 1)
    starts = samples(cluster, "nodelet", "stoker_worker_starts_total")[frozenset()]
    assert starts >= samples(cluster, "nodelet", "stoker_worker_start_seconds_count")[frozenset()]
    assert samples(cluster, "nodelet", "stoker_worker_exits_total").keys() >= {
        frozenset([cause]) for cause in ("out_of_memory", "signal", "failed", "preempted")
    }
    memory = samples(cluster, "nodelet", "stoker_node_memory_used_bytes")[frozenset()]
    assert (
        0 < memory < samples(cluster, "nodelet", "stoker_node_memory_capacity_bytes")[frozenset()]
    )


def test_watches_are_counted_while_they_are_open(cluster: LocalCluster) -> None:
    watchers = samples(cluster, "gcs", "stoker_event_watchers")[frozenset()]
    assert watchers >= 2, "the scheduler's and the nodelet's"


def test_a_token_is_needed_that_may_see_it(cluster: LocalCluster, job: str) -> None:
    urls = urls_of(cluster)
    for url in urls.values():
        with pytest.raises(urllib.error.HTTPError) as refused:
            read(url)
        assert refused.value.code == 401
        refused.value.close()
    viewer, user = token_of(cluster, "viewer"), token_of(cluster, "user")
    assert 'function="square"' in read(urls["gcs"], viewer)
    assert "stoker_gateway_connections" in read(urls["gateway"], viewer)
    theirs = {service: read(url, user) for service, url in urls.items()}
    assert "stoker_nodes" in theirs["gcs"] and "stoker_workers" in theirs["nodelet"]
    for text in theirs.values():
        assert "square" not in text and job not in text, "of other users"


def test_a_connection_to_the_gateway_may_ask_it_and_the_gcs_in_turn(cluster: LocalCluster) -> None:
    place = urllib.parse.urlsplit(cluster.info.gateway_url).netloc
    headers = {"Authorization": f"Bearer {cluster.info.token}"}
    connection = http_client.HTTPConnection(place, timeout=WAIT_S)
    with contextlib.closing(connection):
        connection.request("GET", "/v1/nodes", headers=headers)
        assert b"node_id" in connection.getresponse().read()
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    assert answer.status == 200 and "stoker_gateway_connections" in text
    assert 'route="/metrics"' in read(cluster.info.gateway_url, cluster.info.token)


def test_discovery_has_the_nodes_that_come(cluster: LocalCluster, tmp_path: Path) -> None:
    with session_root(tmp_path):
        node = spawn_node(cluster.info.gcs_url, token=cluster.info.token, num_cpus=1, num_gpus=0)
        try:
            node.wait_ready()
            nodes = http(cluster).call("GET", "/v1/nodes", reply=Page[Node]).items
            client = HttpClient(cluster.info.gcs_url, token=token_of(cluster, "viewer"))
            found = client.call("GET", "/v1/metrics/targets", reply=list[dict])  # type: ignore[type-arg]
        finally:
            node.stop()
    assert len(nodes) == 2
    shown = {one["labels"].get("node"): one["targets"] for one in found}
    assert {one.node_id: [one.url.partition("//")[2]] for one in nodes}.items() <= shown.items()
    assert all(one["labels"]["__scheme__"] == "http" for one in found)
