"""Programs of tasks in the manner of Ray's documentation: they mean the same with Ray's names here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker.ray as ray
from stoker.ray.dag import InputNode, MultiOutputNode
from stoker.ray.exceptions import GetTimeoutError, RayTaskError, TaskCancelledError
from stoker.ray.util import inspect_serializability
from stoker.ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from stoker.ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

if TYPE_CHECKING:
    from tests.e2e.conftest import Cluster, Flags

pytestmark = pytest.mark.usefixtures("cluster")
WAIT_S = 60


@ray.remote
def add(a: int, b: int) -> int:
    return a + b


@ray.remote
def numbers(count: int, pause_s: float = 0.0) -> Any:
    for number in range(count):
        time.sleep(pause_s)
        yield number


@ray.remote
def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_estimate_pi_by_sampling() -> None:
    @ray.remote
    class Progress:
        def __init__(self, total: int) -> None:
            self.total = total
            self.done: dict[int, int] = {}

        def report(self, task: int, done: int) -> None:
            self.done[task] = done

        def get(self) -> float:
            return sum(self.done.values()) / self.total

    @ray.remote
    def sample(count: int, task: int, progress: ray.actor.ActorHandle) -> int:
        import random

        source = random.Random(task)
        inside = sum(source.random() ** 2 + source.random() ** 2 <= 1 for _ in range(count))
        ray.get(progress.report.remote(task, count))
        return inside

    progress = Progress.remote(4 * 10_000)
    inside = ray.get([sample.remote(10_000, task, progress) for task in range(4)])
    assert 3 < 4 * sum(inside) / 40_000 < 3.3
    assert ray.get(progress.get.remote()) == 1.0


def test_refs_are_values_as_arguments_and_refs_inside_of_values() -> None:
    @ray.remote
    def kind(value: Any) -> str:
        inner = value[0] if isinstance(value, list) else value
        return "ref" if isinstance(inner, ray.ObjectRef) else "value"

    ref = ray.put(3)
    assert ray.get([kind.remote(ref), kind.remote([ref])]) == ["value", "ref"]
    assert ray.get(add.remote(ref, add.remote(ref, 1))) == 7


def test_map_and_reduce_in_a_tree() -> None:
    values = [add.remote(number, 0) for number in range(8)]
    while len(values) > 1:
        values = [*values[2:], add.remote(values[0], values[1])]
    assert ray.get(values[0], timeout=WAIT_S) == 28


def test_results_are_taken_as_they_come(flags: Flags) -> None:
    @ray.remote
    def last() -> float:
        flags.wait("the others came")
        return -1.0

    left = [last.remote(), sleep.remote(0.0), sleep.remote(0.3)]
    seen: list[float] = []
    while left:
        ready, left = ray.wait(left, timeout=WAIT_S)
        seen += ray.get(ready)
        if len(seen) == 2:
            flags.raise_("the others came")
    assert sorted(seen[:2]) == [0.0, 0.3]
    assert seen[2:] == [-1.0]


def test_pending_tasks_are_limited() -> None:
    running: list[Any] = []
    done = []
    for number in range(12):
        if len(running) >= 4:
            ready, running = ray.wait(running, num_returns=1)
            done += ray.get(ready)
        running.append(add.remote(number, 1))
    assert sorted(done + ray.get(running)) == list(range(1, 13))


def test_several_results_and_options() -> None:
    @ray.remote(num_returns=3)
    def three() -> tuple[int, int, int]:
        return 0, 1, 2

    assert ray.get(list(three.remote())) == [0, 1, 2]
    assert ray.get(three.options(num_returns=1).remote()) == (0, 1, 2)


def test_a_generator_streams_and_may_be_waited_for() -> None:
    fast, slow = numbers.remote(3), numbers.remote(2, 0.3)
    left: list[Any] = [fast, slow]
    seen = []
    while left:
        (ready,), rest = ray.wait(left, num_returns=1, timeout=WAIT_S)
        try:
            seen.append(ray.get(next(ready)))
            left = [*rest, ready]
        except StopIteration:
            left = rest
    assert sorted(seen) == [0, 0, 1, 1, 2]


def test_a_wait_for_a_silent_generator_ends_in_time() -> None:
    silent = numbers.remote(1, 30)
    assert ray.wait([silent], timeout=0.1) == ([], [silent])
    ray.cancel(silent)


def test_a_generator_with_dynamic_results_is_tried_again(flags: Flags) -> None:
    @ray.remote(num_returns="dynamic", max_retries=1, retry_exceptions=[ValueError])
    def fails_once(name: str) -> Any:
        yield 1
        if not flags.is_up(name):
            flags.raise_(name)
            raise ValueError(name)
        yield 2

    refs = ray.get(fails_once.remote("once"), timeout=WAIT_S)
    assert ray.get(list(refs)) == [1, 2]


def test_a_function_with_dynamic_results_that_is_no_generator_fails() -> None:
    with pytest.raises(RayTaskError, match="not a generator"):
        ray.get(add.options(num_returns="dynamic").remote(1, 2), timeout=WAIT_S)


def test_dynamic_results_are_a_ref_to_refs() -> None:
    refs = ray.get(numbers.options(num_returns="dynamic").remote(3))
    assert [ray.get(ref) for ref in refs] == [0, 1, 2]


def test_an_error_is_the_users_own_and_rays() -> None:
    @ray.remote
    def fail() -> None:
        raise KeyError("missing")

    with pytest.raises(KeyError):
        ray.get(fail.remote())
    with pytest.raises(RayTaskError) as caught:
        ray.get(add.remote(fail.remote(), 1))
    assert isinstance(caught.value.cause, KeyError)


def test_a_task_is_tried_again_after_an_error_it_names(tmp_path: Any) -> None:
    marker = tmp_path / "tried"

    @ray.remote(max_retries=2, retry_exceptions=[OSError])
    def flaky() -> str:
        if not marker.exists():
            marker.touch()
            raise OSError("once")
        return "done"

    assert ray.get(flaky.remote(), timeout=WAIT_S) == "done"


def test_a_timeout_and_a_cancelled_task() -> None:
    ref = sleep.remote(60)
    with pytest.raises(GetTimeoutError):
        ray.get(ref, timeout=0.1)
    ray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        ray.get(ref, timeout=WAIT_S)


def test_nothing_to_wait_for() -> None:
    assert ray.wait([]) == ([], [])


def test_the_cluster_and_its_nodes() -> None:
    (node,) = ray.nodes()
    assert node["Alive"]
    assert node["Resources"]["CPU"] == 4.0
    assert ray.cluster_resources()["GPU"] == 2.0
    assert ray.cluster_resources()[f"node:{node['NodeManagerAddress']}"] == 1.0
    assert ray.available_resources()["disk"] == 2.0
    context = ray.get_runtime_context()
    assert (
        context.get_node_id() == context.node_id.hex() == context.get()["node_id"] == node["NodeID"]
    )


@pytest.mark.parametrize(
    "how",
    ["affinity", "address", "head", "node id", "fallback", "spread"],
)
def test_a_task_is_placed(how: str) -> None:
    (node,) = ray.nodes()
    options: dict[str, Any] = {
        "affinity": {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        },
        "address": {"resources": {f"node:{node['NodeManagerAddress']}": 0.001}},
        "head": {"resources": {"node:__internal_head__": 0.001}},
        "node id": {"label_selector": {"ray.io/node-id": node["NodeID"]}},
        "fallback": {
            "label_selector": {"zone": "south"},
            "fallback_strategy": [{"label_selector": {"zone": "in(west,north)"}}],
        },
        "spread": {"scheduling_strategy": "SPREAD"},
    }[how]
    assert ray.get(add.options(**options).remote(1, 2), timeout=WAIT_S) == 3


def test_a_gang_in_a_placement_group() -> None:
    group = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="PACK", name="gang")
    ray.get(group.ready(), timeout=WAIT_S)
    assert group.wait(timeout_seconds=WAIT_S)
    record = placement_group_table(group)
    assert record["state"] == "CREATED"
    assert record["bundles"] == {0: {"CPU": 1.0}, 1: {"CPU": 1.0}}
    assert set(record["bundles_to_node_id"].values()) == {ray.nodes()[0]["NodeID"]}

    @ray.remote
    def group_id() -> Any:
        current = ray.util.get_current_placement_group()
        return current and current.id

    inside = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=1)
    assert ray.get(group_id.options(scheduling_strategy=inside).remote()) == group.id
    assert ray.get(group_id.remote()) is None
    assert ray.util.get_placement_group("gang") == group
    remove_placement_group(group)


def test_a_graph_is_bound_once_and_executed_often() -> None:
    with InputNode() as given:
        graph = add.bind(add.bind(given[0], given.b), 1)
    assert [ray.get(graph.execute(number, b=2)) for number in range(3)] == [3, 4, 5]
    with InputNode() as given:
        shared = add.bind(given, 1)
        ends = MultiOutputNode([shared, add.bind(shared, shared)])
    assert ray.get(ends.execute(1)) == [2, 4]


def test_what_does_not_pickle_is_named() -> None:
    import threading

    lock = threading.Lock()

    def uses_a_lock() -> Any:
        return lock

    fine, failures = inspect_serializability(uses_a_lock, name="uses_a_lock")
    assert not fine
    assert "lock" in str(failures)
    assert inspect_serializability(len)[0]


def test_the_environment_of_a_task() -> None:
    @ray.remote(runtime_env={"env_vars": {"MODE": "fast"}, "config": {"setup_timeout_seconds": 60}})
    def mode() -> tuple[str | None, Any]:
        import os

        return os.environ.get("MODE"), ray.get_runtime_context().runtime_env["env_vars"]["MODE"]

    assert ray.get(mode.remote(), timeout=WAIT_S) == ("fast", "fast")


def test_the_gpus_of_a_task() -> None:
    @ray.remote(num_gpus=1)
    def devices() -> tuple[int, str, float]:
        import os

        context = ray.get_runtime_context()
        return (
            len(ray.get_gpu_ids()),
            os.environ["CUDA_VISIBLE_DEVICES"],
            context.get_assigned_resources()["GPU"],
        )

    count, visible, assigned = ray.get(devices.remote(), timeout=WAIT_S)
    assert (count, assigned) == (1, 1.0)
    assert visible in ("0", "1")


def test_state_lists(cluster: Cluster) -> None:
    from stoker.ray.util.state import list_nodes, list_tasks, summarize_tasks

    ray.get(add.options(name="listed").remote(1, 2))
    found = list_tasks(filters=[("name", "=", "listed")], limit=10)
    assert [one.state for one in found] == ["FINISHED"]
    assert list_nodes()[0].is_head_node
    assert "listed" in summarize_tasks()["cluster"]["summary"]


def test_a_pool_in_the_manner_of_multiprocessing() -> None:
    from stoker.ray.util.multiprocessing import Pool

    with Pool(2, ray_remote_args={"num_cpus": 1}) as pool:
        assert pool.map(abs, [-1, 2, -3]) == [1, 2, 3]
        assert pool.apply(max, (1, 2)) == 2
        assert sorted(pool.imap_unordered(abs, [-1, -2])) == [1, 2]


def test_a_progress_bar_in_a_task() -> None:
    @ray.remote
    def add_up() -> int:
        from stoker.ray.experimental.tqdm_ray import tqdm

        return sum(tqdm(range(5), desc="numbers"))

    assert ray.get(add_up.remote(), timeout=WAIT_S) == 10
