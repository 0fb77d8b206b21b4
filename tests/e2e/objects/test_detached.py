"""Detached objects end to end: they outlive their makers, their nodes, and are freed by word alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker.exceptions import (
    NameTakenError,
    NotFoundError,
    ObjectFreedError,
    ObjectLostError,
    PayloadTooLargeError,
    SerializationError,
)
from stoker.local.cluster import LocalCluster, spawn_node
from tests.e2e import _cluster
from tests.e2e.conftest import get
from tests.leaks import alive
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.logs(r"lease did not start: .* got no answer")
WAIT_S = 30.0
LARGE = 1 << 20
QUOTA = 64 << 20


class Site:
    """A cluster whose head this driver does not run on, and nodes that come and go."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.nodes: dict[str, LocalCluster] = {}

    def add(self, name: str) -> str:
        """Start a node; return its id."""
        node = spawn_node(
            self.cluster.info.gcs_url,
            token=self.cluster.info.token,
            num_cpus=2,
            num_gpus=0,
            resources={name: 1},
            session_dir=self.folder / name,
        )
        self.nodes[name] = node
        node.wait_ready()
        (node_id,) = [
            one["node_id"]
            for one in stoker.nodes()
            if one["state"] == "ALIVE" and name in one["resources"]
        ]
        return str(node_id)

    def kill(self, name: str, node_id: str) -> None:
        """Kill a node; return once it is dead to the cluster."""
        node = self.nodes.pop(name)
        os.kill(node.pid, signal.SIGKILL)
        until(lambda: self.node(node_id)["state"] == "DEAD", WAIT_S, f"{name} is dead")
        node.stop()

    def node(self, node_id: str) -> Any:
        return self.call("GET", f"/v1/nodes/{node_id}")

    def record(self, ref: stoker.ObjectRef[Any]) -> Any:
        return self.call("GET", f"/v1/detached-objects/{ref.id}")

    def call(self, method: str, path: str) -> Any:
        return _cluster.http(self.cluster).call(method, path, reply=dict)

    def run(self, script: str) -> str:
        """Run another driver; return what it printed."""
        info = self.cluster.info
        env = os.environ | {"STOKER_ADDRESS": info.gcs_url, "STOKER_TOKEN": info.token}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module", params=["shared", "apart"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """``apart``: as if each node were a machine of its own."""
    folder = tmp_path_factory.mktemp("detached")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SHARE_ARENAS", str(int(request.param == "shared")))
        patch.setenv("STOKER_DETACHED_MAX_BYTES", str(QUOTA))
        with _cluster.head(folder, num_cpus=2) as cluster:
            stoker.init(
                cluster.info.gcs_url,
                token=cluster.info.token,
                namespace="app",
                log_to_driver=False,
            )
            made = Site(cluster, folder)
            try:
                yield made
            finally:
                stoker.shutdown()
                for node in made.nodes.values():
                    node.stop()


@pytest.fixture(autouse=True)
def none_left(site: Site) -> Iterator[None]:
    """Each test frees what it makes, and then no node has anything of it."""
    yield
    items = site.call("GET", "/v1/detached-objects")["items"]
    assert not items
    until(lambda: not site.call("GET", "/v1/objects")["items"], WAIT_S, "nodes have freed all")


def large(number: int) -> Any:
    return np.full(LARGE, number, dtype=np.int32)


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_value_outlives_the_driver_that_put_it(site: Site, size: int) -> None:
    script = f"""
        import numpy, stoker
        stoker.init(namespace="app", log_to_driver=False)
        ref = stoker.put(numpy.arange({size}), lifetime="detached", name="weights")
        print(ref.id)
    """
    object_id = site.run(script)
    ref = stoker.get_ref("weights")
    assert ref.id == object_id
    assert int(get(ref)[-1]) == size - 1
    assert int(get(stoker.get_ref("weights")).sum()) == size * (size - 1) // 2
    stoker.free(ref)
    with pytest.raises(ObjectFreedError):
        get(ref)
    with pytest.raises(NotFoundError, match="lifetime='detached'"):
        stoker.get_ref("weights")


@stoker.remote
def total(array: Any, inside: list[stoker.ObjectRef[Any]]) -> int:
    return int(array.sum()) + sum(int(get(one).sum()) for one in inside)


@stoker.remote
def make(number: int) -> stoker.ObjectRef[Any]:
    return stoker.put(large(number), lifetime="detached")


def test_refs_travel_in_arguments_results_and_values(site: Site) -> None:
    ones = stoker.put(large(1), lifetime="detached")
    twos = get(make.remote(2))
    nest = stoker.put([ones, twos], lifetime="detached", name="nest")
    assert get(total.remote(ones, [twos])) == 3 * LARGE
    assert get(total.remote(twos, get(nest))) == 5 * LARGE
    del ones, twos, nest
    inside = get(stoker.get_ref("nest"))
    assert [int(get(one)[0]) for one in inside] == [1, 2]
    stoker.free([*inside, stoker.get_ref("nest")])


def test_a_name_is_for_one_object_of_a_namespace(site: Site) -> None:
    first = stoker.put(1, lifetime="detached", name="same")
    with pytest.raises(NameTakenError, match="same"):
        stoker.put(2, lifetime="detached", name="same")
    other = stoker.put(3, lifetime="detached", name="same", namespace="other")
    assert get(stoker.get_ref("same")) == 1
    assert get(stoker.get_ref("same", namespace="other")) == 3
    with pytest.raises(NotFoundError, match="namespace app, other"):
        stoker.get_ref("same", namespace="third")
    stoker.free([first, other])
    again = stoker.put(4, lifetime="detached", name="same")
    assert get(stoker.get_ref("same")) == 4
    stoker.free(again)


def test_what_cannot_be_detached_is_refused_and_nothing_stays(site: Site) -> None:
    own = stoker.put(large(1))
    with pytest.raises(SerializationError, match="lives no longer"):
        stoker.put([own], lifetime="detached", name="bad")
    with pytest.raises(PayloadTooLargeError, match="STOKER_DETACHED_MAX_BYTES"):
        stoker.put(np.zeros(QUOTA, dtype=np.int8), lifetime="detached")
    with pytest.raises(ValueError, match="copies: 9 copies"):
        stoker.put(large(1), lifetime="detached", copies=9)
    with pytest.raises(ValueError, match="say lifetime"):
        stoker.put(1, name="bad")
    with pytest.raises(NotFoundError):
        stoker.get_ref("bad")
    stoker.free(own)
    with pytest.raises(ObjectFreedError, match="was freed"):
        get(own)


def test_a_copy_on_a_second_node_survives_the_first(site: Site) -> None:
    first = site.add("first")
    made = get(make.options(resources={"first": 0.1}).remote(7))
    assert site.record(made)["nodes"] == [first]
    second = site.add("second")

    @stoker.remote(resources={"second": 0.1})
    def kept() -> stoker.ObjectRef[Any]:
        return stoker.put(large(8), lifetime="detached", copies=2)

    both = get(kept.remote())
    places = set(site.record(both)["nodes"])
    assert second in places and len(places) == 2
    site.kill("first", first)
    with pytest.raises(ObjectLostError, match="all nodes that had it are dead"):
        get(made)
    assert site.record(made)["state"] == "LOST"
    until(
        lambda: len(places := site.record(both)["nodes"]) == 2 and first not in places,
        WAIT_S,
        "a copy was made again",
    )
    site.kill("second", second)
    assert int(get(both)[0]) == 8
    assert int(get(total.remote(both, []))) == 8 * LARGE
    stoker.free([made, both])


def test_a_copy_on_disk_comes_back_with_its_node(site: Site) -> None:
    before = site.add("diskful")

    @stoker.remote(resources={"diskful": 0.1})
    def kept() -> stoker.ObjectRef[Any]:
        return stoker.put(large(5), lifetime="detached", disk=True, name="disk")

    ref = get(kept.remote())
    files = list((site.folder / "diskful").rglob(ref.id))
    assert [one.parent.name for one in files if "detached" in str(one)], files
    site.kill("diskful", before)
    with pytest.raises(ObjectLostError, match="comes back with its copy on disk"):
        get(stoker.get_ref("disk"))
    after = site.add("diskful")
    until(lambda: site.record(ref)["nodes"] == [after], WAIT_S, "its node has it again")
    assert int(get(stoker.get_ref("disk"))[-1]) == 5
    stoker.free(ref)
    until(lambda: not list((site.folder / "diskful").rglob(ref.id)), WAIT_S, "its file is gone")
    site.nodes.pop("diskful").stop()


def test_a_file_is_read_when_no_node_has_it_any_more(site: Site, tmp_path: Path) -> None:
    node = site.add("short")
    path = tmp_path / "value.pkl"

    @stoker.remote(resources={"short": 0.1})
    def kept() -> stoker.ObjectRef[Any]:
        return stoker.put(large(6), lifetime="detached", path=str(path))

    ref = get(kept.remote())
    site.kill("short", node)
    assert int(get(ref)[0]) == 6
    stoker.free(ref)
    assert path.exists()


def register_shelf(folder: str, refusal: str = "") -> None:
    """Teach fsspec of this process the file system ``shelf``: a flat folder, which may refuse to open."""
    import fsspec

    class Shelf(fsspec.AbstractFileSystem):  # type: ignore[misc]
        protocol = "shelf"

        def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
            if refusal:
                raise RuntimeError(refusal)
            return open(f"{folder}/{path}", mode)

    fsspec.register_implementation("shelf", Shelf, clobber=True)


def test_a_file_of_any_file_system_is_read_or_the_error_of_that_is_told(
    site: Site, tmp_path: Path
) -> None:
    from fsspec.registry import _registry

    node = site.add("shelved")
    folder = str(tmp_path)

    @stoker.remote(resources={"shelved": 0.1})
    def kept() -> None:
        register_shelf(folder)
        stoker.put(large(6), lifetime="detached", name="shelved", path="shelf://value.pkl")

    get(kept.remote())
    assert (tmp_path / "value.pkl").exists()
    site.kill("shelved", node)
    try:
        with pytest.raises(ObjectLostError, match=r"shelf://value.pkl cannot be read") as raised:
            get(stoker.get_ref("shelved"))
        assert "ValueError: Protocol not known: shelf" in str(raised.value)
        register_shelf(folder, "credentials have expired")
        with pytest.raises(ObjectLostError, match="RuntimeError: credentials have expired"):
            get(stoker.get_ref("shelved"))
        register_shelf(folder)
        assert int(get(stoker.get_ref("shelved"))[0]) == 6
    finally:
        _registry.pop("shelf", None)
        stoker.free(stoker.get_ref("shelved"))


def test_a_maker_that_is_killed_while_writing_leaves_neither_name_nor_bytes(site: Site) -> None:
    script = """
        import os, signal, numpy, stoker
        from stoker.runtime.objects.detached import DetachedObjects
        stoker.init(log_to_driver=False)
        call = DetachedObjects._call
        def die(self, method, path, *rest):
            if path.endswith("/commit"):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, method, path, *rest)
        DetachedObjects._call = die
        stoker.put(numpy.zeros(1 << 20), lifetime="detached", name="half")
    """
    with pytest.raises(AssertionError):
        site.run(script)
    until(lambda: not site.call("GET", "/v1/detached-objects")["items"], WAIT_S, "it is given up")
    stoker.free(stoker.put(1, lifetime="detached", name="half"))


def test_the_result_of_a_task_outlives_its_caller(site: Site) -> None:
    site.run("""
        import numpy, stoker
        stoker.init(namespace="app", log_to_driver=False)
        @stoker.remote(lifetime="detached", name="result")
        def work():
            return numpy.arange(1 << 20)
        ref = work.remote()
        print(int(stoker.get(ref, timeout=40)[-1]))
    """)
    ref = stoker.get_ref("result")
    assert int(get(ref)[-1]) == LARGE - 1
    stoker.free(ref)


def test_a_driver_that_ends_first_takes_the_running_task_along_and_leaves_the_stored_result(
    site: Site, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    site.run(f"""
        import os, pathlib, time, numpy, stoker
        stoker.init(namespace="app", log_to_driver=False)
        @stoker.remote(lifetime="detached", name="stored")
        def ends():
            return numpy.arange(1 << 20)
        @stoker.remote(lifetime="detached", name="never")
        def runs():
            pathlib.Path({str(pid)!r} + ".part").write_text(str(os.getpid()))
            os.rename({str(pid)!r} + ".part", {str(pid)!r})
            while True:
                time.sleep(0.01)
        refs = [ends.remote(), runs.remote()]
        assert stoker.wait(refs, num_returns=1, timeout=40)[0] == refs[:1]
        while not os.path.exists({str(pid)!r}):
            time.sleep(0.01)
        os._exit(0)
    """)
    until(lambda: not alive(int(pid.read_text())), WAIT_S, "its task is ended")
    assert int(get(stoker.get_ref("stored"))[-1]) == LARGE - 1
    with pytest.raises(NotFoundError):
        stoker.get_ref("never")
    stoker.free(stoker.get_ref("stored"))


@pytest.mark.parametrize("size", [10, LARGE])
def test_a_result_in_the_cache_of_the_cluster_is_made_once(
    site: Site, tmp_path: Path, size: int
) -> None:
    log = tmp_path / "log"
    script = f"""
        import numpy, stoker
        stoker.init(log_to_driver=False)
        @stoker.remote(cache="cluster")
        def work(array, *, factor):
            with open({str(log)!r}, "a") as file:
                file.write("ran ")
            return array * factor
        array = numpy.arange({size})
        for factor in (2, 2, 3):
            result = stoker.get(work.remote(stoker.put(array), factor=factor), timeout=40)
            assert int(result[-1]) == factor * ({size} - 1)
            del result
    """
    site.run(script)
    assert log.read_text() == "ran ran "
    site.run(script)
    assert log.read_text() == "ran ran ", "another job has them too"
    site.run(script.replace("array * factor", "factor * array"))
    assert log.read_text() == "ran ran ran ran ", "other code is another function"
    items = site.call("GET", "/v1/detached-objects")["items"]
    assert {one["namespace"] for one in items} == {"stoker.cache"} and len(items) == 4
    for one in items:
        stoker.free(stoker.get_ref(one["name"], namespace="stoker.cache"))


def test_a_global_that_a_cached_function_names_is_part_of_the_key_unless_one_is_given(
    site: Site, tmp_path: Path
) -> None:
    script = """
        import stoker
        stoker.init(log_to_driver=False)
        FACTOR = 3
        def scaled(number):
            return number * FACTOR
        @stoker.remote(cache="cluster")
        def work(number):
            return scaled(number) + FACTOR
        @stoker.remote(cache="cluster", cache_key=lambda number: f"work {number}")
        def keyed(number):
            return number * FACTOR
        @stoker.remote(cache="cluster", cache_key="work 7")
        def other():
            return -1
        refs = [work.remote(7), keyed.remote(7)]
        print(*stoker.get(refs, timeout=40), stoker.get(other.remote(), timeout=40))
    """
    assert site.run(script) == "24 21 21"
    assert site.run(script.replace("FACTOR = 3", "FACTOR = 4")) == "32 21 21"
    assert site.run(script.replace("number * FACTOR", "FACTOR * number")) == "24 21 21"
    names = [one["name"] for one in site.call("GET", "/v1/detached-objects")["items"]]
    assert len(names) == 4 and "work 7" in names
    for name in names:
        stoker.free(stoker.get_ref(name, namespace="stoker.cache"))


def test_a_cached_result_that_is_lost_or_freed_is_made_again(site: Site, tmp_path: Path) -> None:
    node = site.add("cacher")
    log = tmp_path / "log"

    @stoker.remote(cache="cluster")
    def work(number: int) -> Any:
        with log.open("a") as file:
            file.write("ran ")
        return large(number)

    on_node = work.options(resources={"cacher": 0.1})
    made = on_node.remote(4)
    assert stoker.wait([made], timeout=WAIT_S)[0]
    kept = work.remote(4)
    assert stoker.wait([kept], timeout=WAIT_S)[0]
    del made
    assert log.read_text() == "ran "
    site.kill("cacher", node)
    assert int(get(kept)[0]) == 4
    assert int(get(work.remote(4))[0]) == 4
    assert log.read_text() == "ran ran "
    (one,) = site.call("GET", "/v1/detached-objects")["items"]
    stoker.free(stoker.get_ref(one["name"], namespace="stoker.cache"))
    until(lambda: not site.call("GET", "/v1/objects")["items"], WAIT_S, "nodes have freed it")
    assert int(get(kept)[0]) == 4
    assert log.read_text() == "ran ran ran "
    stoker.free(stoker.get_ref(one["name"], namespace="stoker.cache"))


def test_a_maker_of_a_cached_result_that_is_killed_while_writing_blocks_nobody(
    site: Site, tmp_path: Path
) -> None:
    log = tmp_path / "log"

    @stoker.remote(cache="cluster", max_retries=1)
    def work() -> Any:
        from stoker.runtime.objects.detached import DetachedObjects

        call = DetachedObjects._call

        def die(self: Any, method: str, path: str, *rest: Any) -> Any:
            if path.endswith("/commit"):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(self, method, path, *rest)

        if not log.exists():
            DetachedObjects._call = die  # type: ignore[method-assign]
        with log.open("a") as file:
            file.write("ran ")
        return large(3)

    assert int(stoker.get(work.remote(), timeout=WAIT_S)[0]) == 3
    assert int(stoker.get(work.remote(), timeout=WAIT_S)[0]) == 3
    assert log.read_text() == "ran ran ", "and then it is in the cache"
    (one,) = site.call("GET", "/v1/detached-objects")["items"]
    assert one["state"] == "READY" and one["job_id"], "what is half made ends with its job"
    stoker.free(stoker.get_ref(one["name"], namespace="stoker.cache"))


def test_options_that_make_no_sense_are_refused() -> None:
    def items() -> Iterator[int]:
        yield 1

    with pytest.raises(ValueError, match="no generator"):
        stoker.remote(lifetime="detached")(items).remote()
    with pytest.raises(ValueError, match="durability"):
        stoker.remote(durability={"copies": 2})(abs).remote(1)
    with pytest.raises(ValueError, match="give cache='cluster' as well"):
        stoker.remote(cache_key="key")(abs).remote(1)
    for bad in ("", "/key", 3, "k" * 257):
        with pytest.raises(TypeError, match="is no key"):
            stoker.remote(cache="cluster", cache_key=bad)(abs).remote(1)
