"""Elastic jobs on a running cluster: offers, answers, what rigid work takes back, and why."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError, ConflictError, GetTimeoutError, NotFoundError
from stoker.train import elastic
from stoker_wire.messages.control import Explanation
from stoker_wire.messages.elastic import ElasticPlan
from stoker_wire.messages.work import Job
from tests.e2e._cluster import driver, head, http, line_of
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

WAIT_S = 40.0
LIMITS: dict[str, Any] = {"base_batch": 64, "max_batch": 1024, "max_local_batch": 64}
THETA = (0.05, 0.001, 0.02, 0.001, 0.01, 0.001, 1.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Four GPUs, and rounds that come soon; this process is a driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_ELASTIC_INTERVAL_S", "2")
        patch.setenv("STOKER_ELASTIC_MIN_INTERVAL_S", "0.2")
        with head(tmp_path_factory.mktemp("e"), num_cpus=4, num_gpus=4) as made:
            stoker.init(made.info.gcs_url, token=made.info.token, log_to_driver=False)
            try:
                yield made
            finally:
                stoker.shutdown()


@contextlib.contextmanager
def joined(**limits: Any) -> Iterator[elastic.Session]:
    """An elastic job, that of this driver, which moves easily; all that it had is back at the end."""
    with elastic.join(**{**LIMITS, **limits}, report_interval_s=0.05) as session:
        tell(session, restart_s=0.01)
        yield session
    until(
        lambda: stoker.available_resources() == stoker.cluster_resources(),
        WAIT_S,
        "all replicas are released",
    )


def tell(session: elastic.Session, **hints: Any) -> None:
    """Report, and wait until the cluster knows."""
    before = session.state.hints_at_s
    session.report(**hints)
    until(lambda: session.state.hints_at_s != before, WAIT_S, "the hints are taken")


def begun(session: elastic.Session) -> elastic.Generation:
    """Accept an offer; one that a round has made void meanwhile is followed by another."""
    while True:
        with contextlib.suppress(ConflictError):
            return session.accept(session.wait_for_offer(WAIT_S))


def grown(session: elastic.Session, world: int) -> elastic.Generation:
    """Accept offers until one has so many replicas."""
    while (generation := begun(session)).world != world:
        pass
    return generation


@stoker.remote(num_cpus=0, num_gpus=1)
class Replica:
    def gpus(self) -> list[int]:
        return [int(one) for one in stoker.get_runtime_context().gpu_ids]


@stoker.remote(num_cpus=0, num_gpus=1)
def rigid(number: float) -> float:
    return number


def test_a_job_gets_all_gpus_gives_one_back_on_demand_and_has_it_again(
    cluster: LocalCluster,
) -> None:
    with joined() as session:
        generation = grown(session, 4)
        replicas = [
            Replica.options(scheduling_strategy=one).remote() for one in generation.strategies()
        ]
        gpus = stoker.get([one.gpus.remote() for one in replicas], timeout=WAIT_S)
        assert sorted(gpu for (gpu,) in gpus) == [0, 1, 2, 3], "each has a GPU of its own"
        waiting = rigid.remote(0.1)
        offer = session.wait_for_offer(WAIT_S)
        assert offer.world < 4 and offer.must_answer_by_s is not None
        assert not stoker.wait([waiting], timeout=0.5)[0], "it is not released before the answer"
        assert {one.bundle for one in offer.replicas} < {one.bundle for one in generation.replicas}
        smaller = session.accept(offer)
        assert stoker.get(waiting, timeout=WAIT_S) == 0.1
        assert smaller.number > generation.number
        assert grown(session, 4).number > smaller.number
        assert session.state.preemptions == 0


def test_a_job_that_does_not_answer_in_time_has_nothing_left_and_begins_anew(
    cluster: LocalCluster,
) -> None:
    with joined(grace_s=1.0) as session:
        first = grown(session, 4)
        replica = Replica.options(scheduling_strategy=first.strategies()[0]).remote()
        stoker.get(replica.gpus.remote(), timeout=WAIT_S)
        assert stoker.get(rigid.remote(0.1), timeout=WAIT_S) == 0.1
        state = session.state
        assert state.preemptions == 1
        with pytest.raises(stoker.exceptions.ActorDiedError):
            stoker.get(replica.gpus.remote(), timeout=WAIT_S)
        again = begun(session)
        assert again.number > first.number
        with pytest.raises(ConflictError, match="is not on offer to job"):
            session.accept(first)


def test_two_jobs_never_have_more_than_there_is_and_the_end_of_one_gives_all_to_the_other(
    cluster: LocalCluster,
) -> None:
    program = f"""
        import stoker, sys
        from stoker.train import elastic
        stoker.init()
        with elastic.join(**{LIMITS!r}, max_replicas=2) as session:
            generation = session.accept(session.wait_for_offer({WAIT_S}))
            print("has", generation.world, flush=True)
            sys.stdin.readline()
    """
    with joined() as session:
        grown(session, 4)
        with driver(cluster, program) as other:
            ours = begun(session).world
            theirs = int(line_of(other, "has"))
            assert 1 <= theirs <= 2 and ours + theirs <= 4
        assert grown(session, 4).world == 4


def test_what_a_job_says_of_itself_is_seen_and_what_is_no_number_is_dropped_and_counted(
    cluster: LocalCluster,
) -> None:
    with joined() as session:
        grown(session, 4)
        tell(
            session,
            params=THETA,
            params_error=0.02,
            grad_sqr=1.0,
            grad_var=8.0,
            profiled_replicas=4,
            restart_s=0.5,
            batch=256,
            local_batch=64,
            lr_scale=2.0,
            goodput=900.0,
            efficiency=0.8,
        )
        tell(session, params=(math.nan, *THETA[1:]))
        tell(session, grad_sqr=-1.0, grad_var=1.0)
        job_id = stoker.get_runtime_context().job_id
        job = http(cluster).call("GET", f"/v1/jobs/{job_id}", reply=Job)
        state = job.elastic
        assert state is not None and state.hints is not None
        assert (state.hints.batch, state.hints.lr_scale, state.noise_scale) == (256, 2.0, 512.0)
        assert state.hints_dropped == 2
        assert state.hints_problem == "grad_sqr is -1.0: it must be a number, and not negative"
        assert state.allocation() == session.generation.nodes

        def planned() -> bool:
            plan = http(cluster).call("GET", "/v1/elastic-plan", reply=ElasticPlan)
            (pool,) = plan.pools
            (own,) = pool.jobs
            assert (own.job_id, own.present, own.target) == (job_id, own.present, own.present)
            assert sum(pool.rooms.values()) == 4
            return bool(own.speedup and own.speedup > 1.5 and own.less_worth)

        until(planned, WAIT_S, "a round counts with its hints")
        explained = http(cluster).call("GET", f"/v1/jobs/{job_id}/explain", reply=Explanation)
        assert "it is elastic and has 4 replicas (4 on n_" in explained.summary
        assert "its last hints were dropped: grad_sqr is -1.0" in explained.summary
        assert "it could use no more than it has" in explained.summary


def test_replicas_may_be_made_of_cpus_and_few_by_their_limits(cluster: LocalCluster) -> None:
    with joined(resources={"CPU": 1.0}, max_replicas=3, min_replicas=2) as session:
        generation = begun(session)
        assert generation.world == 2, "powers of two within a node"
        with pytest.raises(GetTimeoutError, match="no offer came within 1 s"):
            session.wait_for_offer(1.0)


def test_who_waits_is_told_when_no_offer_can_come(cluster: LocalCluster) -> None:
    session = elastic.join(**LIMITS, min_replicas=5)
    job_id = stoker.get_runtime_context().job_id
    http(cluster).call("DELETE", f"/v1/jobs/{job_id}/scaling")
    with pytest.raises(NotFoundError, match="is not elastic"):
        session.wait_for_offer(WAIT_S)
    session.close()
    with pytest.raises(ConflictError, match="this session is closed"):
        session.wait_for_offer(WAIT_S)


def test_limits_that_make_no_sense_are_refused_by_name(cluster: LocalCluster) -> None:
    for wrong, field in (
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas"),
        ({"base_batch": 2048}, "base_batch"),
        ({"resources": {"GPU": 2}}, "resources.GPU"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"node_filter": "labels."}, "node_filter"),
    ):
        with pytest.raises(BadRequestError) as refused:
            elastic.join(**{**LIMITS, **wrong})
        assert field in (refused.value.field or refused.value.message)
