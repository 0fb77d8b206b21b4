"""Drains and restarts of every service, one after the other, under a steady load that nothing of it hurts."""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker.runtime.net.http import HttpClient
from stoker_migrations.command import upgrade
from tests.chaos._load import GET_S, Load
from tests.chaos._services import Apart, Service, apart
from tests.chaos._workload import (
    Echo,
    Tally,
    block,
    count_to,
    double,
    last_of,
    sum_of_doubles,
    version_of_worker,
)
from tests.chaos.matrix.cell import TERMINAL, states_of, tells
from tests.chaos.versions.next_minor import launcher, next_version
from tests.e2e import _cluster
from tests.e2e._cluster import session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# Services that are away for a moment are warned of; errors and tracebacks stay unexpected.
pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

ENOUGH = {
    "task": 10,
    "nested": 2,
    "object": 10,
    "put": 10,
    "large": 10,
    "stream": 3,
    "call": 10,
    "tally": 5,
    "actor": 1,
}
"""Rounds of each kind of load that must succeed after each step."""
KEPT = 30
"""How many objects of a kind are kept, and read later."""
PAUSE_S = 0.2
"""Between two rounds of a kind: a load that is steady, not one that takes all that the machine has."""
DRAIN_S = 40.0


@contextlib.contextmanager
def _attached(folder: Path, *, share: bool, standby: bool = False, **given: Any) -> Iterator[Apart]:
    """A cluster of which this process is a driver; unless nodes ``share`` memory, each is as a machine."""
    shared = {"STOKER_SHARE_ARENAS": str(int(share))}
    with (
        session_root(folder / "s"),
        pytest.MonkeyPatch.context() as patch,
        apart(folder, **given, **shared) as made,
    ):
        patch.setenv(*next(iter(shared.items())))
        if standby:
            made.add_scheduler()
        stoker.init(made.address, token=made.token, log_to_driver=False, namespace="load")
        try:
            yield made
        finally:
            stoker.shutdown()


Kept = deque[tuple[int, Any]]


@dataclass
class Work:
    """What the load calls and keeps, and the tasks whose answers it has."""

    actors: list[Any] = field(default_factory=lambda: [Echo.remote() for _ in range(6)])
    tallies: list[Any] = field(default_factory=lambda: [Tally.remote() for _ in range(2)])
    blocks: Kept = field(default_factory=Kept)
    puts: Kept = field(default_factory=Kept)
    answered: set[str] = field(default_factory=set)


def _load(work: Work) -> Load:

    def get(refs: Any) -> Any:
        answers = stoker.get(refs, timeout=GET_S)
        work.answered.update(ref.task_id for ref in (refs if isinstance(refs, list) else [refs]))
        return answers

    def task(number: int) -> None:
        numbers = range(number, number + 8)
        assert get([double.remote(one) for one in numbers]) == [2 * one for one in numbers]

    def nested(number: int) -> None:
        assert get(sum_of_doubles.remote([number, 1, 2])) == 2 * (number + 3)

    def keep(kept: Kept, number: int, ref: Any) -> None:
        kept.append((number, ref))
        if len(kept) > KEPT:
            made, oldest = kept.popleft()
            assert int(stoker.get(oldest, timeout=GET_S)[-1]) == made

    def object_(number: int) -> None:
        keep(work.blocks, number, block.remote(number))

    def put(number: int) -> None:
        ref = stoker.put(np.full(1 << 16, number, dtype=np.int32))
        assert get(last_of.remote(ref)) == number
        keep(work.puts, number, ref)

    def large(number: int) -> None:
        assert get(last_of.remote(np.full(1 << 17, number, dtype=np.int32))) == number

    def stream(number: int) -> None:
        items = [int(get(ref)[-1]) for ref in count_to.remote(10)]
        assert items == list(range(10)), number

    def call(number: int) -> None:
        answers = get([one.echo.remote(number) for one in work.actors])
        assert answers == [number] * len(work.actors)

    def tally(number: int) -> None:
        answers = get([one.add.remote() for one in work.tallies])
        assert answers == [number + 1] * len(work.tallies), number

    def actor(number: int) -> None:
        made = Echo.remote()
        assert get(made.echo.remote(number)) == number
        stoker.kill(made)

    return Load(
        ENOUGH,
        pause_s=PAUSE_S,
        task=task,
        nested=nested,
        object=object_,
        put=put,
        large=large,
        stream=stream,
        call=call,
        tally=tally,
        actor=actor,
    )


class Steps:
    """The steps that were taken under a load, how long each took, and its slowest calls meanwhile."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.seconds: dict[str, float] = {}
        self.slowest_s: dict[str, dict[str, float]] = {}

    def take(self, name: str, step: Callable[[], object]) -> None:
        """Take a step; the load goes on after it."""
        self.load.slowest_s = dict.fromkeys(self.load.slowest_s, 0.0)
        began_s = time.monotonic()
        step()
        self.seconds[name] = round(time.monotonic() - began_s, 2)
        self.load.goes_on()
        self.slowest_s[name] = {
            kind: round(took_s, 2) for kind, took_s in self.load.slowest_s.items()
        }

    def record(self, record_property: Callable[[str, object], None]) -> None:
        """Check that nothing failed; put the numbers into the test's report."""
        record_property("seconds", json.dumps(self.seconds))
        record_property("slowest", json.dumps(self.slowest_s))
        record_property("counts", json.dumps(self.load.counts))
        assert not self.load.failures, "\n".join(self.load.failures)


def _replace(cluster: Apart, old: Service) -> None:
    """Start a node in the place of another, which is drained and leaves."""
    names = {node["pid"]: node["node_id"] for node in cluster.nodes().values()}
    cluster.add_nodelet()
    path = f"/v1/nodes/{names[old.pid]}/drain"
    body = {"deadline_s": DRAIN_S, "reason": "an upgrade"}
    cluster.client.call("POST", path, body, reply=dict[str, Any])
    assert old.ended(2 * DRAIN_S) == 0, old.said()


def _restart(service: Service, as_: tuple[str, ...]) -> None:
    assert service.stop() == 0, service.said()
    service.launch_by(as_)
    service.start()


def _restart_scheduler(service: Service, as_: tuple[str, ...]) -> None:
    """Restart a scheduler; if it led, another leads then. One that stands by is not ready."""
    assert service.stop() == 0, service.said()
    service.launch_by(as_)
    service.start(ready=False)
    until(lambda: service.answers("/healthz"), GET_S, f"{service.name} answers")


def _objects(cluster: Apart) -> list[dict[str, Any]]:
    """The objects whose home is a living node; copies stay until room is needed."""
    nodes = [node for node in cluster.nodes().values() if node["state"] == "ALIVE"]
    clients = [HttpClient(node["url"], token=cluster.token) for node in nodes]
    pages = [one.call("GET", "/v1/objects", reply=dict[str, Any]) for one in clients]
    return [one for page in pages for one in page["items"] if not one["copy_of"]]


def _check(cluster: Apart, work: Work) -> None:
    """Check what the drains have done: actors used up no restart, and objects that nobody needs are gone."""
    work.blocks.clear()
    work.puts.clear()
    try:
        until(lambda: not _objects(cluster), GET_S, "what was moved is freed", interval_s=0.1)
    except TimeoutError as error:
        raise AssertionError(f"{error}: {_objects(cluster)}") from None
    actors = (*work.actors, *work.tallies)
    records = [_cluster.actor_record(one._info.actor_id) for one in actors]
    assert [one["restarts"] for one in records] == [0] * len(actors), "none was used up"
    assert any(one["preemptions"] for one in records), "some were moved"


def _check_history(cluster: Apart, work: Work) -> None:
    """Check that each answer is there as a task that finished, and that whatever began has an end."""
    job_id = stoker.get_runtime_context().job_id

    def missing() -> dict[str, dict[int, str]]:
        known = {task: states_of(one) for task, one in cluster.attempts(job_id).items()}
        untold = {one for one in work.answered if not tells(known.get(one, {}), "ended")}
        return {one: known.get(one, {}) for one in untold} | {
            one: states for one, states in known.items() if not TERMINAL.issuperset(states.values())
        }

    try:
        until(lambda: not missing(), GET_S, "the history is whole", interval_s=0.5)
    except TimeoutError as error:
        raise AssertionError(f"{error}: {list(missing().items())[:5]}") from None


def _versions(cluster: Apart, nodelets: int) -> set[str]:
    """What all processes of the cluster say that they are, and a worker."""
    nodes = [node for node in cluster.nodes().values() if node["state"] == "ALIVE"]
    assert len(nodes) == nodelets
    services = (*cluster.replicas, *cluster.standbys, cluster.scheduler)
    urls = [*(one.url for one in services), *(node["url"] for node in nodes)]
    told = [
        HttpClient(url, token=cluster.token).call("GET", "/healthz", reply=dict[str, Any])
        for url in urls
    ]
    said = {one["version"] for one in (*told, *nodes)}
    return said | {stoker.get(version_of_worker.remote(), timeout=GET_S)}


@pytest.mark.parametrize("share", [True, False])
def test_a_drain_under_load_hurts_no_call(
    tmp_path: Path, share: bool, record_property: Callable[[str, object], None]
) -> None:
    with _attached(tmp_path, share=share, nodelets=2) as cluster:
        work = Work()
        with _load(work) as load:
            load.goes_on()
            steps = Steps(load)
            for nodelet in list(cluster.nodelets):  # one of them is the driver's own
                steps.take(nodelet.name, lambda one=nodelet: _replace(cluster, one))
        steps.record(record_property)
        _check(cluster, work)


@pytest.mark.parametrize(
    ("ahead", "nodelets"),
    [
        # Whatever these do, the upgrade of two nodes does as well.
        pytest.param(0, 4, id="restart", marks=pytest.mark.soak),
        pytest.param(1, 4, id="upgrade of four", marks=pytest.mark.soak),
        pytest.param(1, 2, id="upgrade"),
    ],
)
def test_a_rolling_restart_of_the_whole_cluster_hurts_no_call(
    tmp_path: Path,
    postgres_url: str,
    ahead: int,
    nodelets: int,
    record_property: Callable[[str, object], None],
) -> None:
    upgrade(postgres_url)
    as_ = launcher(ahead)
    with _attached(
        tmp_path,
        share=False,
        nodelets=nodelets,
        replicas=2,
        database_url=postgres_url,
        standby=True,
    ) as cluster:
        work = Work()
        with _load(work) as load:
            load.goes_on()
            steps = Steps(load)
            for replica in cluster.replicas:
                steps.take(replica.name, lambda one=replica: _restart(one, as_))
            for scheduler in (*cluster.standbys, cluster.scheduler):
                steps.take(scheduler.name, lambda one=scheduler: _restart_scheduler(one, as_))
            cluster.launcher = as_
            for nodelet in list(cluster.nodelets):
                steps.take(nodelet.name, lambda one=nodelet: _replace(cluster, one))
        steps.record(record_property)
        _check(cluster, work)
        _check_history(cluster, work)
        assert _versions(cluster, nodelets) == {next_version(stoker.__version__, ahead)}
