"""Objects of a node that dies: another node has a copy, or the tasks that made them run again."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import GetTimeoutError, NotFoundError, ObjectLostError
from stoker.local.cluster import LocalCluster, spawn_node
from tests.e2e import _cluster
from tests.e2e.conftest import get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


pytestmark = pytest.mark.logs(r"lease did not start: .* got no answer")

LENGTH = 100_000
NEAR = {"near": 0.01}


@dataclass
class Nodes:
    """The driver's node, and others that tests add and kill."""

    cluster: LocalCluster
    folder: Path
    started: list[LocalCluster] = field(default_factory=list)

    def add(self, name: str, **offer: Any) -> LocalCluster:
        """Add a node that has ``name`` as a resource."""
        number = len(self.started)
        node = spawn_node(
            self.cluster.info.gcs_url,
            token=self.cluster.info.token,
            num_gpus=0,
            num_cpus=offer.pop("num_cpus", 2),
            resources={name: 1000},
            session_dir=self.folder / f"node{number}",
            **offer,
        )
        self.started.append(node)
        node.wait_ready()
        return node


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SHARE_ARENAS", "0")
        with _cluster.head(folder, num_cpus=2, resources={"near": 1000}) as cluster:
            nodes = Nodes(cluster, folder)
            try:
                stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
                yield nodes
            finally:
                stoker.shutdown()
                for node in nodes.started:
                    node.stop()


def kill(node: LocalCluster) -> None:
    os.kill(node.pid, signal.SIGKILL)


@stoker.remote(num_cpus=0.1)
def ones(count: int, log: str = "", scale: float = 1.0) -> Any:
    import numpy as np

    note(log)
    return np.ones(count) * scale


@stoker.remote(num_cpus=0.1)
def plus(array: Any, amount: float, log: str = "") -> Any:
    note(log)
    return array + amount


@stoker.remote(num_cpus=0.1)
def total(*arrays: Any) -> Any:
    return sum(arrays)


def note(log: str) -> None:
    """Leave one more line in a file: an execution."""
    if log:
        with open(log, "a") as file:
            file.write("x\n")


def executions(log: Path) -> int:
    return len(log.read_text().splitlines())


def on(node: LocalCluster) -> Any:
    """The strategy that prefers this node while it lives."""
    [found] = [n for n in stoker.nodes() if n["pid"] == node.pid]
    return stoker.NodeAffinity(node_id=found["node_id"], soft=True)


def test_a_lost_result_is_made_again(nodes: Nodes, tmp_path: Path) -> None:
    far = nodes.add("far")
    log = tmp_path / "log"
    refs = [ones.options(scheduling_strategy=on(far)).remote(LENGTH, str(log), i) for i in range(5)]
    stoker.wait(refs, num_returns=5, timeout=40)
    kill(far)
    values = get(refs)
    assert [float(v[0]) for v in values] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert executions(log) == 10


def test_what_was_freed_on_the_way_is_made_again_too(nodes: Nodes, tmp_path: Path) -> None:
    far = nodes.add("far")
    log = tmp_path / "log"
    there = on(far)
    first = ones.options(scheduling_strategy=there).remote(LENGTH, str(log))
    second = plus.options(scheduling_strategy=there).remote(first, 1, str(log))
    third = plus.options(scheduling_strategy=there).remote(second, 1, str(log))
    stoker.wait([third], timeout=40)
    del first, second
    kill(far)
    assert float(get(third)[0]) == 3.0
    assert executions(log) == 6


def test_a_copy_on_another_node_is_used_first(nodes: Nodes, tmp_path: Path) -> None:
    far = nodes.add("far")
    log = tmp_path / "log"
    ref = ones.options(scheduling_strategy=on(far)).remote(LENGTH, str(log))
    assert float(get(ref)[0]) == 1.0  # which brought a copy here
    kill(far)
    assert float(get(plus.options(resources=NEAR).remote(ref, 1))[0]) == 2.0
    assert float(get(ref)[0]) == 1.0
    assert executions(log) == 1


@pytest.mark.parametrize("max_retries", [0, 3])
def test_a_copy_on_a_node_that_is_silent_for_a_while_is_waited_for(
    max_retries: int, nodes: Nodes, tmp_path: Path
) -> None:
    far, holder = nodes.add("far"), nodes.add("holder")
    log = tmp_path / "log"
    make = ones.options(scheduling_strategy=on(far), max_retries=max_retries)
    ref = make.remote(LENGTH, str(log))
    assert get(plus.options(resources={"holder": 0.01}).remote(ref, 1)) is not None
    kill(far)
    until(lambda: state(far) == "DEAD", 40, "its home is dead")
    os.kill(holder.pid, signal.SIGSTOP)
    try:
        until(lambda: state(holder) == "SUSPECT", 40, "the other is suspected")
        with pytest.raises(GetTimeoutError, match="may have a copy, and did not answer yet"):
            stoker.get(ref, timeout=1)
    finally:
        os.kill(holder.pid, signal.SIGCONT)
    assert float(get(ref)[0]) == 1.0
    assert executions(log) == 1
    holder.stop()


def state(node: LocalCluster) -> str:
    """The state of a node in the gcs."""
    [found] = [n for n in stoker.nodes() if n["pid"] == node.pid]
    return str(found["state"])


def test_arguments_of_tasks_and_actors_are_recovered(nodes: Nodes, tmp_path: Path) -> None:
    class Holder:
        def __init__(self, refs: list[Any]) -> None:
            self.refs = refs

        def read(self) -> float:
            return float(stoker.get(self.refs[0])[0])

        def first(self, array: Any) -> float:
            return float(array[0])

    far = nodes.add("far")
    there = on(far)
    refs = [ones.options(scheduling_strategy=there).remote(LENGTH, "", i) for i in range(3)]
    stoker.wait(refs, num_returns=3, timeout=40)
    holder = stoker.remote(num_cpus=0, resources=NEAR)(Holder).remote([refs[0]])
    assert get(holder.first.remote(refs[1]))  # warm
    kill(far)
    task = plus.options(resources=NEAR).remote(refs[2], 1)
    assert get(holder.read.remote()) == 0.0
    assert get(holder.first.remote(refs[1])) == 1.0
    assert float(get(task)[0]) == 3.0


def test_what_must_not_run_twice_is_lost_with_the_reason(nodes: Nodes) -> None:
    far = nodes.add("far")
    ref = ones.options(scheduling_strategy=on(far), max_retries=0).remote(LENGTH)
    stoker.wait([ref], timeout=40)
    kill(far)
    with pytest.raises(ObjectLostError, match="max_retries=0") as raised:
        get(ref)
    assert "is lost with its node" in str(raised.value)
    assert "its owner is" in str(raised.value)


@stoker.remote(num_cpus=0.1, num_returns=2)
def pair(log: str) -> tuple[Any, Any]:
    import numpy as np

    note(log)
    return np.zeros(LENGTH), np.ones(LENGTH)


@stoker.remote(num_cpus=0.1, num_returns="streaming")
def count_up(length: int, log: str) -> Iterator[Any]:
    import numpy as np

    note(log)
    for number in range(length):
        yield np.full(LENGTH, number)


@stoker.remote(num_cpus=0.1)
def once(log: str) -> Any:
    """Works the first time only."""
    import numpy as np

    if Path(log).exists():
        raise ValueError("the input is gone")
    note(log)
    return np.ones(LENGTH)


def test_all_results_of_a_task_are_made_in_one_execution(nodes: Nodes, tmp_path: Path) -> None:
    far = nodes.add("far")
    log = tmp_path / "log"
    left, right = pair.options(scheduling_strategy=on(far)).remote(str(log))
    stoker.wait([left, right], num_returns=2, timeout=40)
    kill(far)
    assert [float(v[0]) for v in get([left, right])] == [0.0, 1.0]
    assert executions(log) == 2


def test_items_of_a_generator_are_made_again(nodes: Nodes, tmp_path: Path) -> None:
    far = nodes.add("far")
    log = tmp_path / "log"
    items = list(count_up.options(scheduling_strategy=on(far)).remote(300, str(log)))
    kept = [items[3], items[299]]
    del items
    kill(far)
    assert [float(v[0]) for v in get(kept)] == [3.0, 299.0]
    assert executions(log) == 2


@stoker.remote(num_cpus=0.1)
def gated(length: int, log: str) -> Iterator[Any]:
    """Yield all but the last item, and that once there is a gate; note each attempt."""
    import time

    import numpy as np

    note(log)
    for number in range(length - 1):
        yield np.full(LENGTH, number)
    while not Path(f"{log}.gate").exists():
        time.sleep(0.01)
    yield np.full(LENGTH, length - 1)


@pytest.mark.parametrize("read", ["as they come", "late"])
def test_items_that_are_lost_with_a_running_generator_come_from_its_next_attempt(
    read: str, nodes: Nodes, tmp_path: Path
) -> None:
    """They were yielded, and not read, when their node died: the generator never ends meanwhile."""
    far = nodes.add("far")
    log = tmp_path / "log"
    stream = gated.options(scheduling_strategy=on(far)).remote(12, str(log))
    refs = [next(stream) for _ in range(8)]  # three more are there, and nobody took them
    first = float(get(refs[0])[0])
    kill(far)
    if read == "late":
        until(lambda: executions(log) == 2, 60, "another attempt runs")
    values = [float(v[0]) for v in get(refs)]
    values += [float(get(next(stream))[0]) for _ in range(3)]
    assert (first, values) == (0.0, [float(number) for number in range(11)])
    assert stoker.wait([stream.completed()], timeout=0)[0] == [], "it still runs"
    Path(f"{log}.gate").touch()
    assert [float(get(ref)[0]) for ref in stream] == [11.0]
    assert executions(log) == 2
    assert [float(v[0]) for v in get(refs)] == [float(number) for number in range(8)]


def test_a_task_that_fails_when_it_is_executed_again_says_so(nodes: Nodes, tmp_path: Path) -> None:
    far = nodes.add("far")
    ref = once.options(scheduling_strategy=on(far)).remote(str(tmp_path / "log"))
    stoker.wait([ref], timeout=40)
    kill(far)
    with pytest.raises(
        ObjectLostError, match="was executed again to make it, and failed"
    ) as raised:
        get(ref)
    assert "the input is gone" in str(raised.value)
    with pytest.raises(ObjectLostError, match="the input is gone"):
        get(ref)


def test_the_history_tells_which_loss_a_task_was_executed_again_for(
    nodes: Nodes, tmp_path: Path
) -> None:
    far = nodes.add("far")
    there = on(far)
    leaves = [ones.options(scheduling_strategy=there).remote(LENGTH) for _ in range(3)]
    ref = total.options(scheduling_strategy=there).remote(*leaves)
    stoker.wait([ref], timeout=40)
    del leaves
    kill(far)
    get(ref)
    http = _cluster.http(nodes.cluster)

    def attempts() -> list[dict[str, Any]]:  # as the worker and the owner report them
        path = f"/v1/tasks/{ref.task_id}/attempts"
        try:
            page = http.call("GET", path, reply=dict[str, Any])
        except NotFoundError:
            return []
        return [one for one in page["items"] if one["state"] == "FINISHED"]

    reported = lambda: [one["reconstructs"] for one in attempts()][1:] > [""]  # noqa: E731
    until(reported, 40, "both executions are in the history")
    first, second = attempts()
    told = ("reconstructs", "reconstructions", "lineage_depth")
    assert [first[field] for field in told] == ["", 0, 0]
    assert [second[field] for field in told] == [f"{ref.id} is lost with its node", 1, 2]
    explained = http.call("GET", f"/v1/tasks/{ref.task_id}/explain", reply=dict[str, Any])
    again = f"executed again (re-execution 1, lineage depth 2) as {second['reconstructs']}"
    assert explained["summary"].endswith(again)


def test_a_get_with_a_timeout_says_that_a_value_is_being_made_again(
    nodes: Nodes, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"

    @stoker.remote(num_cpus=0.1)
    def gated(path: str) -> Any:
        import time

        import numpy as np

        while Path(path).exists():
            time.sleep(0.01)
        return np.ones(LENGTH)

    far = nodes.add("far")
    ref = gated.options(scheduling_strategy=on(far)).remote(str(gate))
    stoker.wait([ref], timeout=40)
    gate.touch()
    kill(far)
    with pytest.raises(GetTimeoutError, match="to be made again"):
        stoker.get(ref, timeout=4)
    gate.unlink()
    assert float(get(ref)[0]) == 1.0


OUTLIVES = """
    import os, signal, time
    import numpy as np
    import stoker

    stoker.init({address!r}, token={token!r}, log_to_driver=False)
    own = stoker.runtime.current.runtime().identity.node.node_id
    [node] = [n for n in stoker.nodes() if n["node_id"] == own]
    assert node["pid"] == {pid}, "the driver belongs to the node that is killed"
    print(own, stoker.runtime.current.runtime().identity.peer_id)

    @stoker.remote(num_cpus=0.1)
    def ones():
        return np.ones({length})

    before = [ones.remote() for _ in range(4)]
    put = stoker.put(np.zeros({length}))
    stoker.wait(before, num_returns=4, timeout=40)
    os.kill({pid}, signal.SIGKILL)
    assert all(v.sum() == {length} for v in stoker.get(before, timeout=40))
    while os.path.exists(node["arena_dir"]):
        time.sleep(0.01)
    assert stoker.get(stoker.put(np.zeros({length})), timeout=40).sum() == 0
    assert stoker.get(ones.remote(), timeout=40).sum() == {length}
    try:
        stoker.get(put, timeout=40)
    except stoker.exceptions.ObjectLostError as error:
        print(error)
"""


def test_a_driver_outlives_its_nodelet(
    tmp_path: Path, driver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_SHARE_ARENAS", "0")
    with _cluster.head(tmp_path, num_cpus=2) as cluster:
        nodes = Nodes(cluster, tmp_path)
        http = _cluster.http(cluster)
        try:
            while (first := http.call("GET", "/v1/nodes", reply=dict[str, Any])["items"][0])[
                "pid"
            ] == cluster.pid:  # a driver belongs to the first node of its machine
                nodes.add("far")
            script = OUTLIVES.format(
                address=cluster.info.gcs_url,
                token=cluster.info.token,
                pid=first["pid"],
                length=LENGTH,
            )
            ended = driver(script)
        finally:
            for node in nodes.started:
                node.stop()
    assert ended.returncode == 0, ended.stderr
    own, error = ended.stdout.split("\n", 1)
    node_id, owner_id = own.split()
    assert "is lost with its node" in error
    assert f"node {node_id} on " in error and " is dead since " in error
    assert f"its owner is {owner_id}, no other node has a copy" in error
    assert "it was put: no task can make it again" in error
    assert "WARNING" not in ended.stderr
