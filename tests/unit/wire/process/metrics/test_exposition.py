"""The exposition text: what a parser of Prometheus reads of numbers, labels and distributions."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker_wire.errors import InternalError
from stoker_wire.process.metrics import Distribution, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Name and values of labels -> value."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_a_distribution_is_a_histogram_whose_buckets_add_up() -> None:
    metrics, took = Metrics("gcs"), Distribution((1.0, 2.5))
    metrics.show("stoker_task_run_seconds", lambda: {"f": took})
    for value in (0.5, 1.0, 2.0, 99.0):
        took.observe(value)
    first = samples(metrics)
    took.observe(0.1)
    name = "stoker_task_run_seconds"
    assert [first[f"{name}_bucket", "f", le] for le in ("1.0", "2.5", "+Inf")] == [2, 3, 4]
    assert first[f"{name}_count", "f"] == 4 and first[f"{name}_sum", "f"] == 102.5
    assert samples(metrics)[f"{name}_bucket", "f", "1.0"] == 3
    text = metrics.render().decode()
    assert f"# TYPE {name} histogram\n" in text and text.endswith("\n")


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "new\nline", "lambda <λ>", "{a,b}"])
def test_any_name_comes_back_as_it_is(name: str) -> None:
    metrics = Metrics("gcs")
    metrics.show("stoker_tasks_ended_total", lambda: {(name, "FINISHED"): 3})
    assert samples(metrics)["stoker_tasks_ended_total", name, "FINISHED"] == 3


def test_values_of_one_label_and_of_several() -> None:
    metrics = Metrics("gcs")
    metrics.show("stoker_nodes", lambda: {"ALIVE": 2, "DEAD": 0})
    metrics.show("stoker_jobs_live", lambda: math.inf)
    found = samples(metrics)
    assert (found["stoker_nodes", "ALIVE"], found["stoker_nodes", "DEAD"]) == (2, 0)
    assert found["stoker_jobs_live",] == math.inf
    with pytest.raises(ValueError, match="zip"):
        metrics.show("stoker_nodes", lambda: {("ALIVE", "too much"): 1})
        metrics.render()


def test_a_metric_that_is_in_no_table_is_refused() -> None:
    with pytest.raises(InternalError, match="stoker_unknown is no metric"):
        Metrics("gcs").show("stoker_unknown", lambda: 1)


@pytest.mark.logs(r"stoker_node_load1 cannot be measured")
def test_a_file_of_the_kernel_that_cannot_be_read_costs_its_own_metric_only() -> None:
    def lacking() -> float:
        raise FileNotFoundError("/proc/none")

    metrics = Metrics("nodelet")
    metrics.show("stoker_node_load1", lacking)
    metrics.show("stoker_node_cpus", lambda: 2.0)
    found = samples(metrics)
    assert found["stoker_node_cpus",] == 2 and ("stoker_node_load1",) not in found


def test_what_is_of_users_can_be_left_out() -> None:
    metrics = Metrics("gcs")
    metrics.show("stoker_tasks_ended_total", lambda: {("secret", "FINISHED"): 1})
    metrics.show("stoker_nodes", lambda: {"ALIVE": 1})
    assert b"secret" in metrics.render()
    text = metrics.render(of_users=False)
    assert b"secret" not in text and b'stoker_nodes{state="ALIVE"} 1\n' in text


def test_methods_that_strangers_invent_are_one() -> None:
    metrics = Metrics("gateway")
    for number in range(100):
        metrics.answered(f"GET{number}", "/v1/gateway", 200, 0.1)
    metrics.answered("GET", "/v1/gateway", 200, 0.1)
    counts = {
        key: n for key, n in samples(metrics).items() if key[0] == "stoker_http_requests_total"
    }
    assert sorted(counts.values()) == [1, 100]
