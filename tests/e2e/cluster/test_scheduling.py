"""Scheduling end to end: resources, GPUs, labels, affinity, what can never run, and explanations."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import InfeasibleError
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.e2e.conftest import Cluster


@pytest.fixture(autouse=True)
def all_went_back(cluster: Cluster) -> Iterator[None]:
    yield
    until(cluster.is_idle, 40, "all leases went back")


@stoker.remote
def one() -> int:
    return 1


def run_at_once(flags: Flags, fit: int, count: int, **options: Any) -> None:
    """Of ``count`` tasks with these options, ``fit`` run at the same time, and no more."""

    @stoker.remote(**options)
    def work(index: int) -> int:
        flags.raise_(f"in-{index}")
        flags.wait("go")
        return index

    refs = [work.remote(i) for i in range(count)]

    def running() -> int:
        return sum(flags.is_up(f"in-{i}") for i in range(count))

    until(lambda: running() >= fit, 40, f"{fit} run")
    assert stoker.wait(refs, timeout=0.3 if fit < count else 0)[0] == []
    assert running() == fit
    flags.raise_("go")
    assert get(refs) == list(range(count))


@pytest.mark.parametrize(
    ("options", "fit"),
    [
        ({"num_cpus": 1}, 4),
        ({"num_cpus": 2}, 2),
        ({"num_cpus": 1.5}, 2),
        ({"num_cpus": 0.5}, 6),
        ({"num_cpus": 0}, 6),
        ({"num_cpus": 0, "resources": {"disk": 1}}, 2),
        ({"num_cpus": 0, "resources": {"disk": 0.4}}, 5),
        ({"num_cpus": 0, "num_gpus": 1}, 2),
        ({"num_cpus": 0, "num_gpus": 0.5}, 4),
        ({"num_cpus": 0, "num_gpus": 0.4}, 4),
        ({"num_cpus": 0, "num_gpus": 2}, 1),
    ],
    ids=str,
)
def test_so_many_run_at_once_as_the_resources_allow(
    options: dict[str, Any], fit: int, flags: Flags
) -> None:
    run_at_once(flags, fit, 6, **options)


def test_memory_is_a_resource_like_others(flags: Flags) -> None:
    half = stoker.cluster_resources()["memory"] * 0.45
    run_at_once(flags, 2, 3, num_cpus=0, memory=half)


def test_leases_show_what_they_hold(cluster: Cluster, flags: Flags) -> None:
    @stoker.remote(num_cpus=1, num_gpus=1, resources={"disk": 0.5})
    def work() -> dict[str, float]:
        flags.raise_("runs")
        flags.wait("go")
        return dict(stoker.get_runtime_context().assigned_resources)

    ref = work.remote()
    flags.wait("runs")
    left = stoker.available_resources()
    assert (left["CPU"], left["GPU"], left["disk"]) == (3, 1, 1.5)
    leases = cluster.call("GET", "/v1/leases")[
        "items"
    ]  # also idle ones without CPUs, of tests before
    assert [one["resources"]["GPU"] for one in leases if "GPU" in one["resources"]] == [1]
    flags.raise_("go")
    assert get(ref) == {"CPU": 1, "GPU": 1, "disk": 0.5}


# -- GPUs --------------------------------------------------------------------------------------------


@stoker.remote
def devices() -> tuple[str | None, list[int]]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), stoker.get_gpu_ids()


def test_a_task_sees_its_gpus_and_no_others() -> None:
    visible, ids = get(devices.options(num_gpus=1).remote())
    assert visible == str(ids[0])
    visible, ids = get(devices.options(num_gpus=2).remote())
    assert sorted((visible or "").split(",")) == ["0", "1"]
    assert ids == [0, 1]
    visible, ids = get(devices.remote())
    assert not visible
    assert ids == []


def test_the_variable_is_set_before_any_import_of_the_user(tmp_path: Any) -> None:
    (tmp_path / "reads_devices.py").write_text(
        "import os\nAT_IMPORT = os.environ.get('CUDA_VISIBLE_DEVICES')\n"
    )

    @stoker.remote(num_gpus=1, runtime_env={"py_modules": [str(tmp_path / "reads_devices.py")]})
    def look() -> tuple[str, list[int]]:
        import reads_devices  # type: ignore[import-not-found]

        return reads_devices.AT_IMPORT, stoker.get_gpu_ids()

    visible, ids = get(look.remote())
    assert visible == str(ids[0])


def test_whole_gpus_are_exclusive_and_fractions_stay_on_one_device(flags: Flags) -> None:
    @stoker.remote(num_cpus=0)
    def hold(name: str) -> list[int]:
        flags.raise_(name, stoker.get_gpu_ids())
        flags.wait("go")
        return stoker.get_gpu_ids()

    whole = hold.options(num_gpus=1).remote("whole")
    flags.wait("whole")
    parts = [hold.options(num_gpus=0.5).remote(f"part{i}") for i in range(2)]
    for i in range(2):
        flags.wait(f"part{i}")
    late = hold.options(num_gpus=0.25).remote("late")
    assert stoker.wait([late], timeout=0.2)[0] == []
    assert not flags.is_up("late")
    flags.raise_("go")
    (device,) = get(whole)
    assert get(parts) == [[1 - device], [1 - device]]
    assert len(get(late)) == 1


def test_a_worker_with_a_gpu_is_not_used_without(flags: Flags) -> None:
    get(devices.options(num_gpus=2, num_cpus=1).remote())
    for visible, ids in get([devices.remote() for _ in range(8)]):
        assert not visible
        assert ids == []


# -- where -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "selector", [{"zone": "north"}, {"zone": "in(north,south)"}, {"zone": "!south"}]
)
def test_label_selectors_that_fit(selector: dict[str, str]) -> None:
    assert get(one.options(label_selector=selector).remote()) == 1


def test_node_affinity_hard_and_soft(cluster: Cluster) -> None:
    here = stoker.NodeAffinity(node_id=cluster.info.node_id)
    assert get(one.options(scheduling_strategy=here).remote()) == 1
    elsewhere = stoker.NodeAffinity(node_id="n_0000000000000000", soft=True)
    assert get(one.options(scheduling_strategy=elsewhere).remote()) == 1
    assert get(one.options(scheduling_strategy="SPREAD").remote()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_cpus": 5}, ["CPU", "5", "4"]),
        ({"num_gpus": 3}, ["GPU", "3", "2"]),
        ({"resources": {"tape": 1}}, ["tape"]),
        ({"label_selector": {"zone": "south"}}, ["zone", "south"]),
        ({"accelerator_type": "H100"}, ["H100"]),
        (
            {"scheduling_strategy": stoker.NodeAffinity(node_id="n_0000000000000000")},
            ["n_0000000000000000"],
        ),
    ],
    ids=lambda o: next(iter(o)) if isinstance(o, dict) else None,
)
def test_what_no_node_can_ever_run_fails_with_the_reason(
    options: dict[str, Any], said: list[str]
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        get(one.options(**options).remote())
    waited = re.search(r"\(for (\d+) s\)", str(caught.value))
    assert waited is None or int(waited[1]) < 10, "the grace that is set counts, not the usual 10 s"
    for word in [*said, "one"]:
        assert word in str(caught.value)


def test_other_tasks_go_on_while_one_cannot(flags: Flags) -> None:
    bad = one.options(num_cpus=50).remote()
    assert get([one.remote() for _ in range(20)]) == [1] * 20
    with pytest.raises(InfeasibleError):
        get(bad)


def test_on_infeasible_wait_waits_and_can_be_cancelled() -> None:
    ref = one.options(num_cpus=50, on_infeasible="wait").remote()
    assert stoker.wait([ref], timeout=1.0)[0] == []
    with pytest.raises(stoker.exceptions.GetTimeoutError, match="50 CPU"):
        stoker.get(ref, timeout=0.01)
    stoker.cancel(ref)
    with pytest.raises(stoker.exceptions.TaskCancelledError):
        get(ref)


# -- explanations --------------------------------------------------------------------------------------


def test_a_queued_task_is_explained_over_http(cluster: Cluster, flags: Flags) -> None:
    @stoker.remote(num_cpus=4)
    def hold() -> None:
        flags.raise_("runs")
        flags.wait("go")

    running = hold.remote()
    flags.wait("runs")
    queued = one.options(num_cpus=3).remote()

    def explained() -> Any:
        try:
            found = cluster.call("GET", f"/v1/tasks/{queued.task_id}/explain")
        except stoker.exceptions.NotFoundError:
            return None
        return found if found.get("verdicts") else None

    found = until(explained, 40, "the task is known and explained")
    (verdict,) = found["verdicts"]
    assert verdict["node_id"] == cluster.info.node_id
    assert "CPU" in str(verdict)
    flags.raise_("go")
    assert get([running, queued]) == [None, 1]

    def finished() -> bool:
        found = cluster.call("GET", f"/v1/tasks/{queued.task_id}")
        return bool(found["state"] == "FINISHED")

    until(finished, 40, "the history has it")
    assert cluster.call("GET", f"/v1/tasks/{queued.task_id}/explain")["summary"]


def test_the_history_knows_every_task_once(cluster: Cluster) -> None:
    named = one.options(name="counted")
    get([named.remote() for _ in range(200)])

    def count() -> int:
        items = cluster.call("GET", "/v1/tasks", name="counted", limit=1000)["items"]
        assert all(t["name"] == "counted" for t in items)
        return sum(t["state"] == "FINISHED" for t in items)

    until(lambda: count() == 200, 40, "all are in the history")


def test_idle_workers_serve_a_new_class_at_once(driver: Callable[..., Any]) -> None:
    """Leases of one class that are idle go to another that waits, long before their grace ends."""
    done = driver(
        """
        import stoker
        stoker.init(num_cpus=2, num_gpus=0, log_to_driver=False)

        @stoker.remote
        def one():
            return 1

        stoker.get([one.remote() for _ in range(8)], timeout=40)
        print(stoker.get(one.options(num_cpus=2).remote(), timeout=40))
        """,
        STOKER_LEASE_IDLE_S="600",
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_nested_work_has_its_parents_environment_and_its_own_variables_win() -> None:
    @stoker.remote(num_cpus=0)
    def see() -> dict[str, str | None]:
        import os

        return {name: os.environ.get(name) for name in ("A", "B", "C")}

    @stoker.remote(num_cpus=0)
    class Nested:
        def see(self) -> list[Any]:
            own = see.options(runtime_env={"env_vars": {"B": "of the call", "C": "3"}})
            return stoker.get([see.remote(), own.remote()])

    @stoker.remote(num_cpus=0)
    def parent() -> list[Any]:
        nested = Nested.options(runtime_env={"env_vars": {"B": "of the actor"}}).remote()
        return [*stoker.get([see.remote(), nested.see.remote()])]

    env = {"env_vars": {"A": "1", "B": "of the task"}}
    mine, (in_actor, own) = get(parent.options(runtime_env=env).remote())
    assert mine == {"A": "1", "B": "of the task", "C": None}
    assert in_actor == {"A": "1", "B": "of the actor", "C": None}
    assert own == {"A": "1", "B": "of the call", "C": "3"}
    assert get(see.remote()) == {"A": None, "B": None, "C": None}
