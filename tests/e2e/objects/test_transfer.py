"""Values between nodes that do not see each other's memory: pulled once per node, read in place, freed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.local.cluster import spawn_node
from tests.e2e import _cluster
from tests.e2e.conftest import get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

NBYTES = 20_000_000


@dataclass
class Nodes:
    """What a task asks for to run on this process's node, or on the other."""

    near: dict[str, float]
    far: dict[str, float]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head and one more node; this process belongs to either."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SHARE_ARENAS", "0")
        with _cluster.head(folder, num_cpus=2, resources={"one": 4}) as cluster:
            node = spawn_node(
                cluster.info.gcs_url,
                token=cluster.info.token,
                num_cpus=2,
                num_gpus=0,
                resources={"other": 4},
                session_dir=folder / "far",
            )
            try:
                node.wait_ready()
                stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
                own = stoker.runtime.current.runtime().identity.node
                assert own is not None
                [mine] = [n for n in stoker.nodes() if n["node_id"] == own.node_id]
                names = ["one", "other"] if "one" in mine["resources"] else ["other", "one"]
                yield Nodes(near={names[0]: 1}, far={names[1]: 1})
            finally:
                stoker.shutdown()
                node.stop()


def listed(object_id: str) -> list[dict[str, Any]]:
    """What the nodes say of an object."""
    page = stoker.runtime.current.runtime().job.http.call(
        "GET", "/v1/objects", reply=dict[str, Any]
    )
    return [one for one in page["items"] if one["object_id"] == object_id]


@stoker.remote(scheduling_strategy="SPREAD")
def where(_: bytes = b"") -> str:
    return str(stoker.get_runtime_context().node_id)


@pytest.mark.parametrize("how", ["one_by_one", "at_once", "with_an_argument"])
def test_spread_tasks_go_round_the_nodes_however_short(nodes: Nodes, how: str) -> None:
    lies_there = make.options(resources=nodes.far).remote(1)
    stoker.wait([lies_there], timeout=40)
    # A lease that is kept for a moment counts as load, and loaded nodes are passed over.
    idle = lambda: stoker.available_resources() == stoker.cluster_resources()  # noqa: E731
    until(idle, 40, "no lease is held")
    if how == "one_by_one":
        ran = [get(where.remote()) for _ in range(10)]
    elif how == "at_once":
        ran = get([where.remote() for _ in range(10)])
    else:
        ran = [get(where.remote(lies_there)) for _ in range(10)]
    counts = [ran.count(name) for name in set(ran)]
    assert len(counts) == 2, ran
    assert min(counts) >= 3, ran


@stoker.remote
def make(seed: int) -> bytearray:
    return bytearray([seed]) * NBYTES


@stoker.remote
def check(value: bytearray, seed: int) -> str:
    assert len(value) == NBYTES and value[0] == value[-1] == seed
    return stoker.get_runtime_context().get_node_id()


def test_a_result_of_another_node_is_read_from_a_copy_in_the_own_arena(nodes: Nodes) -> None:
    ref = make.options(resources=nodes.far).remote(7)
    for _ in range(2):
        value = get(ref)
        assert len(value) == NBYTES and value[0] == value[-1] == 7
    home, copy = sorted(listed(ref._entry.object_id), key=lambda one: one["copy_of"])
    assert home["copy_of"] == "" and copy["copy_of"] == home["node_id"] != copy["node_id"]
    assert copy["nbytes"] == home["nbytes"]


def test_an_argument_is_pulled_once_by_all_tasks_of_a_node_and_freed_with_its_ref(
    nodes: Nodes,
) -> None:
    ref = stoker.put(bytearray([9]) * NBYTES)
    places = get([check.options(resources=nodes.far).remote(ref, 9) for _ in range(4)])
    assert len(set(places)) == 1
    object_id = ref._entry.object_id
    until(lambda: len(listed(object_id)) == 2, 40, "the object and its copy are listed")
    del ref
    until(lambda: not listed(object_id), 40, "the object and its copy are freed")


def test_values_go_both_ways_between_workers_of_two_nodes(nodes: Nodes) -> None:
    made = [make.options(resources=(nodes.far, nodes.near)[i % 2]).remote(i) for i in range(4)]
    places = get(
        [
            check.options(resources=(nodes.near, nodes.far)[i % 2]).remote(ref, i)
            for i, ref in enumerate(made)
        ]
    )
    assert len(set(places)) == 2
