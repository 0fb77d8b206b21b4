"""Elastic jobs while nodes, the scheduler and the gcs die: one generation at a time, none left over."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker import exceptions
from stoker.train import elastic
from tests.chaos._services import Apart, apart
from tests.e2e._cluster import session_root
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.logs(r'"level": "warning"', r"^this process: stoker[._]")

WAIT_S = 60.0
LIMITS: dict[str, Any] = {
    "base_batch": 64,
    "max_batch": 1024,
    "max_local_batch": 64,
    "resources": {"CPU": 1.0},
}
THETA = (0.5, 0.001, 0.001, 0.0001, 0.001, 0.0001, 1.2)


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[Apart]:
    """Three nodes of two CPUs each, with rounds that come soon; this process is the driver, on the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_ELASTIC_INTERVAL_S", "1")
        patch.setenv("STOKER_ELASTIC_MIN_INTERVAL_S", "0.2")
        with session_root(tmp_path / "s"), apart(tmp_path, nodelets=1, cpus=2) as made:
            stoker.init(made.gcs.url, token=made.token, log_to_driver=False)
            made.add_nodelet(cpus=2)
            made.add_nodelet(cpus=2)
            try:
                yield made
            finally:
                stoker.shutdown()


def joined() -> elastic.Session:
    """An elastic job that scales well over nodes, and moves easily."""
    session = elastic.join(**LIMITS)
    session.report(params=THETA, grad_sqr=1.0, grad_var=1e4, profiled_replicas=8, restart_s=0.01)
    return session


def begun(session: elastic.Session) -> elastic.Generation:
    """Accept an offer; one that a round has made void meanwhile is followed by another."""
    while True:
        with contextlib.suppress(exceptions.ConflictError):
            return session.accept(session.wait_for_offer(WAIT_S))


def grown(session: elastic.Session, world: int) -> elastic.Generation:
    while (generation := begun(session)).world != world:
        pass
    return generation


def used(cluster: Apart) -> float:
    """The CPUs that are reserved on nodes that live."""
    total, free = stoker.cluster_resources(), stoker.available_resources()
    return total.get("CPU", 0.0) - free.get("CPU", 0.0)


@stoker.remote(num_cpus=1)
class Replica:
    def node(self) -> str:
        return stoker.get_runtime_context().node_id


def test_the_loss_of_a_node_makes_a_generation_of_what_is_left_and_room_makes_it_grow_again(
    trio: Apart,
) -> None:
    with joined() as session:
        first = grown(session, 6)
        replicas = [
            Replica.options(scheduling_strategy=one, max_restarts=0).remote()
            for one in first.strategies()
        ]
        nodes = stoker.get([one.node.remote() for one in replicas], timeout=WAIT_S)
        assert nodes == [one.node_id for one in first.replicas]
        lost = trio.nodes()["n2"]["node_id"]
        trio.nodelets[2].kill()
        offer = session.wait_for_offer(WAIT_S)
        assert lost not in offer.nodes and offer.number > first.number
        kept = session.accept(offer)
        for one, replica in zip(first.replicas, replicas, strict=True):
            if one in kept.replicas:
                assert stoker.get(replica.node.remote(), timeout=WAIT_S) == one.node_id
        trio.add_nodelet(cpus=2)
        assert grown(session, 6).number > kept.number
    until(lambda: used(trio) == 0, WAIT_S, "all that it had is free")


def test_a_scheduler_that_takes_over_goes_on_with_the_generation_that_lives(trio: Apart) -> None:
    with joined() as session:
        first = grown(session, 6)
        replicas = [
            Replica.options(scheduling_strategy=one, max_restarts=0).remote()
            for one in first.strategies()
        ]
        stoker.get([one.node.remote() for one in replicas], timeout=WAIT_S)
        trio.scheduler.kill()
        trio.scheduler.start()
        assert stoker.get([one.node.remote() for one in replicas], timeout=WAIT_S)

        @stoker.remote(num_cpus=1)
        def rigid() -> int:
            return 1

        waiting = rigid.remote()
        offer = session.wait_for_offer(WAIT_S)
        assert offer.world < 6
        smaller = session.accept(offer)
        assert stoker.get(waiting, timeout=WAIT_S) == 1
        state = session.state
        assert (state.preemptions, state.lost) == (0, 0)
        assert grown(session, 6).number > smaller.number
    until(lambda: used(trio) == 0, WAIT_S, "all that it had is free")


def test_offers_go_on_after_the_gcs_was_killed(trio: Apart) -> None:
    with joined() as session:
        first = grown(session, 6)
        trio.gcs.kill()
        trio.gcs.start()

        @stoker.remote(num_cpus=1)
        def rigid() -> int:
            return 1

        waiting = rigid.remote()
        smaller = begun(session)
        assert smaller.number > first.number
        assert stoker.get(waiting, timeout=WAIT_S) == 1
    until(lambda: used(trio) == 0, WAIT_S, "all that it had is free")
