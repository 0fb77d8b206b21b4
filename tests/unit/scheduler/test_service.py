"""The scheduler service over real HTTP, with a small gcs and nodelets behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from stoker_scheduler import api, engine, gcs_feed
from stoker_scheduler.nodelet_clients import NodeletClients
from stoker_wire.errors import (
    BadRequestError,
    DeadlineExceededError,
    ForbiddenError,
    IdempotencyError,
    InfeasibleError,
    JobFinishedError,
    NotLeaderError,
    NotReadyError,
    RuntimeEnvSetupError,
    StartError,
    StokerError,
    UnavailableError,
)
from stoker_wire.http.client.client import Client
from stoker_wire.http.server.tokens import TokenSigner
from stoker_wire.messages.cluster import (
    ActorSpec,
    BlockLease,
    ClusterResources,
    Demand,
    DriverSpec,
    HeldLeases,
    LeaseKind,
    LeaseReply,
    LeaseRequest,
    Node,
)
from stoker_wire.messages.common import OnInfeasible, RuntimeEnv
from stoker_wire.messages.control import ConstraintKind, Explanation, Fit, Page, QueueEntry
from stoker_wire.messages.groups import Bundle, GroupStrategy, PlanOutcome, PlanReply, PlanRequest
from stoker_wire.messages.work import JobState
from tests.unit.scheduler.fakes import BAD_ENV, TOKEN, FakeNodelet, a_job
from tests.unit.scheduler.service_setup import SETTINGS, Setup, ids, until


async def test_grants_what_fits_now_and_returns_it_all_on_release(setup: Setup) -> None:
    nodelet = await setup.node(CPU=4)
    await setup.lead()
    reply = await setup.ask(10, CPU=1)
    assert len(reply.granted) == 4
    assert reply.granted[0].worker_id and reply.granted[0].address.node_id == "n_1"
    assert (await setup.resources()).available["CPU"] == 0
    assert len(nodelet.held) == 4 and nodelet.orders[0].epoch == 1
    await setup.release(*ids(reply))

    async def all_free() -> bool:
        return (await setup.resources()).available == (await setup.resources()).total

    await until(all_free)
    assert not nodelet.held
    assert await setup.leases() == ()


async def test_a_repeated_request_gets_the_same_leases(setup: Setup) -> None:
    nodelet = await setup.node(CPU=4)
    await setup.lead()
    first, second = await asyncio.gather(
        setup.ask(2, request_id="r_same", CPU=1), setup.ask(2, request_id="r_same", CPU=1)
    )
    third = await setup.ask(2, request_id="r_same", CPU=1)
    assert ids(first) == ids(second) == ids(third)
    assert len(nodelet.held) == 2


async def test_a_request_that_is_asked_again_with_a_later_deadline_ends_the_first_wait_cleanly(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "REPLY_MARGIN_S", 0.0)
    await setup.node(CPU=1)
    await setup.lead()
    demand = Demand(job_id="job_1", resources={"CPU": 2}, on_infeasible=OnInfeasible.WAIT)
    asked = LeaseRequest(request_id="r_again", owner_id="p_1", demand=demand, wait_s=20)
    short = msgspec.structs.replace(asked, wait_s=0.1)
    async with asyncio.TaskGroup() as group:
        again = group.create_task(
            setup.client.call("POST", "/v1/leases", asked, reply=LeaseReply, retry=False)
        )
        with pytest.raises(DeadlineExceededError, match="asked again meanwhile"):
            await setup.client.call("POST", "/v1/leases", short, reply=LeaseReply, retry=False)
        await setup.node(CPU=2)
        assert ids(await again)


async def test_a_request_waits_for_a_release_and_empty_polls_say_why(setup: Setup) -> None:
    await setup.node(CPU=1)
    await setup.lead()
    held = await setup.ask(CPU=1)
    empty = await setup.ask(CPU=1, owner="p_2", wait_s=0.05)
    assert empty.granted == () and "fits on none of 1 node now" in empty.note
    waiting = asyncio.create_task(setup.ask(CPU=1, owner="p_2"))

    async def queued() -> bool:
        page = await setup.client.call("GET", "/v1/queue", reply=Page[QueueEntry])
        return len(page.items) == 1

    await until(queued)
    explanation = await setup.client.call(
        "POST",
        "/v1/explain",
        Demand(job_id="job_1", resources={"CPU": 1}, name="train"),
        reply=Explanation,
    )
    assert explanation.state == "QUEUED" and explanation.queue_position == 0
    assert explanation.verdicts[0].fit is Fit.BUSY
    assert "0 CPU of 1 CPU is free" in explanation.verdicts[0].detail
    assert "(task train holds 1 CPU)" in explanation.remedy
    await setup.release(*ids(held))
    assert len((await waiting).granted) == 1


async def test_the_queue_tells_the_whole_demand(setup: Setup) -> None:
    await setup.node(CPU=1)
    await setup.lead()
    options = {"label_selector": {"zone": "mars"}, "on_infeasible": OnInfeasible.WAIT}
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(setup.ask(CPU=1, options=options))

        async def queue() -> tuple[QueueEntry, ...]:
            return (await setup.client.call("GET", "/v1/queue", reply=Page[QueueEntry])).items

        async def queued() -> bool:
            return bool(await queue())

        await until(queued)
        (entry,) = await queue()
        explanation = await setup.client.call(
            "POST", "/v1/explain", entry.demand, reply=Explanation
        )
        assert explanation.state == "INFEASIBLE" and explanation.queue_position == 0
        assert "zone=mars" in explanation.verdicts[0].detail
        asked.cancel()


async def test_infeasible_demands_fail_with_the_table_and_the_remedy(setup: Setup) -> None:
    await setup.node(CPU=4)
    await setup.lead()
    with pytest.raises(InfeasibleError) as caught:
        await setup.ask(CPU=1, GPU=2)
    text = str(caught.value)
    assert "needs 2 GPU, the node has 0 GPU in all" in text
    assert "start a node with 1 CPU, 2 GPU" in text
    patient = await setup.ask(GPU=2, wait_s=0.3, options={"on_infeasible": "wait"})
    assert patient.granted == () and patient.note.startswith("infeasible")


@pytest.mark.parametrize(
    ("resources", "field"),
    [({"GPU": 1.5}, "demand.resources.GPU"), ({"CPU": -1.0}, "demand.resources.CPU")],
)
async def test_senseless_demands_are_refused(
    setup: Setup, resources: dict[str, float], field: str
) -> None:
    await setup.lead()
    with pytest.raises(BadRequestError) as caught:
        await setup.ask(**resources)
    assert caught.value.field == field


async def test_failed_starts_go_to_another_node_and_bad_environments_to_the_asker(
    setup: Setup,
) -> None:
    bad = await setup.node(CPU=4)
    good = await setup.node(CPU=4)
    await setup.lead()
    bad.fail_next.append(StartError("fork failed"))
    reply = await setup.ask(CPU=1)
    assert reply.granted[0].lease.node_id == "n_2" and len(good.held) == 1
    good.fail_next.append(BAD_ENV)
    bad.fail_next.append(BAD_ENV)
    with pytest.raises(RuntimeEnvSetupError, match="nonesuch"):
        await setup.ask(CPU=1)
    assert len(bad.held) + len(good.held) == 1


@pytest.mark.parametrize(
    ("error", "of_the_node"),
    [
        (NotReadyError("it starts"), True),
        (DeadlineExceededError("no answer came"), True),
        (StartError("fork failed"), False),
    ],
    ids=["not ready", "deadline", "refusal"],
)
async def test_a_failure_of_the_node_keeps_every_environment_away_and_a_refusal_one(
    setup: Setup, error: StokerError, of_the_node: bool
) -> None:
    bad = await setup.node(CPU=4)
    await setup.node(CPU=4)
    await setup.lead()
    bad.fail_next.append(error)
    await setup.ask(CPU=1, options={"runtime_env": RuntimeEnv(env_vars={"A": "1"})})
    other = Demand(job_id="job_1", resources={"CPU": 1})
    explanation = await setup.client.call("POST", "/v1/explain", other, reply=Explanation)
    rules = {verdict.node_id: verdict.rule for verdict in explanation.verdicts}
    assert rules["n_1"] == ("node_refused" if of_the_node else "")


async def test_the_id_of_a_request_gives_its_leases_to_its_owner_alone(setup: Setup) -> None:
    await setup.node(CPU=2)
    await setup.lead()
    first = ids(await setup.ask(CPU=1, request_id="r_own"))
    assert ids(await setup.ask(CPU=1, request_id="r_own")) == first
    waiting = asyncio.create_task(setup.ask(CPU=2, request_id="r_wait"))

    async def queued() -> bool:
        return bool((await setup.client.call("GET", "/v1/queue", reply=Page[QueueEntry])).items)

    await until(queued)
    for request_id in ("r_own", "r_wait"):
        for owner, job in (("p_2", "job_1"), ("p_1", "job_2")):
            with pytest.raises(IdempotencyError, match="by another owner"):
                await setup.ask(CPU=1, request_id=request_id, owner=owner, job=job)
    await setup.release(*first)
    assert len((await waiting).granted) == 1


async def test_idle_leases_are_preempted_for_another_owner(setup: Setup) -> None:
    await setup.node(CPU=2)
    await setup.lead()
    mine = ids(await setup.ask(2, CPU=1))
    polling = asyncio.create_task(setup.poll("p_1", *mine, idle=True, wait_s=20))
    waiting = asyncio.create_task(setup.ask(CPU=1, owner="p_2"))
    orders = await polling
    assert len(orders.preempted) == 1
    await setup.release(*orders.preempted)
    assert len((await waiting).granted) == 1


async def test_a_preemption_of_a_lease_that_the_waiting_poll_does_not_name_comes_with_the_next(
    setup: Setup,
) -> None:
    await setup.node(CPU=2)
    await setup.lead()
    mine = ids(await setup.ask(2, CPU=1))
    await setup.poll("p_1", *mine, idle=True)
    polling = asyncio.create_task(setup.poll("p_1", wait_s=0.3))
    waiting = asyncio.create_task(setup.ask(CPU=1, owner="p_2"))
    assert (await polling).preempted == ()
    earlier = asyncio.create_task(setup.poll("p_3", wait_s=20))
    again = asyncio.create_task(setup.poll("p_1", *mine, wait_s=20))
    await asyncio.wait({earlier, again}, return_when=asyncio.FIRST_COMPLETED)
    assert again.done() and not earlier.done(), "it waited for news that it had missed"
    await setup.release(*again.result().preempted)
    assert len((await waiting).granted) == 1
    earlier.cancel()
    await asyncio.wait({earlier})


async def test_a_nodelet_is_told_until_it_hears_that_a_lease_is_preempted(setup: Setup) -> None:
    nodelet = await setup.node(CPU=1)
    await setup.lead()
    options = {"preemptible": True, "preemption_grace_s": 60.0}
    low = ids(await setup.ask(1, options=options, CPU=1))
    held = nodelet.held[low[0]].lease
    assert held.preemptible and held.preemption_grace_s == 60.0
    asking = asyncio.ensure_future(setup.ask(1, options={"priority": 3}, CPU=1))

    async def told() -> bool:
        return len(nodelet.stops) > 1

    await until(told)
    stop = nodelet.stops[1]
    assert (stop.lease_ids, stop.epoch) == (tuple(low), 1) and 0 < stop.grace_s <= 60.0
    assert stop.reason == ("preempted on node n_1 for train of job_1, of priority 3 (its own is 0)")
    await setup.release(*low)
    assert len((await asking).granted) == 1


async def test_a_lease_that_its_owner_lists_no_more_ends_and_the_owner_is_notified(
    setup: Setup,
) -> None:
    setup.settings = msgspec.structs.replace(SETTINGS, lease_ttl_s=1.0)
    nodelet = await setup.node(CPU=2)
    await setup.lead()
    kept, dropped = ids(await setup.ask(2, CPU=1))
    await setup.poll("p_1", kept, dropped)

    async def expired() -> bool:
        orders = await setup.poll("p_1", kept, wait_s=0.05)
        return dropped in orders.lost

    await until(expired)
    await until(_released(nodelet, dropped))

    async def only_one() -> bool:
        return [lease.lease_id for lease in await setup.leases()] == [kept]

    await until(only_one)
    assert (await setup.poll("p_1", dropped)).lost == (dropped,)


def _released(nodelet: FakeNodelet, lease_id: str) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return any(lease_id in order.lease_ids and order.kill for order in nodelet.released)

    return check


async def test_a_blocked_lease_lends_its_cpu(setup: Setup) -> None:
    await setup.node(CPU=1)
    await setup.lead()
    (parent,) = ids(await setup.ask(CPU=1))
    path = f"/v1/leases/{parent}/blocked"
    await setup.client.call("POST", path, BlockLease(blocked=True))
    child = await setup.ask(CPU=1, owner="p_child")
    assert len(child.granted) == 1
    await setup.client.call("POST", path, BlockLease(blocked=False))
    assert (await setup.resources()).available["CPU"] == -1


async def test_a_job_whose_end_was_not_told_frees_what_it_held(setup: Setup) -> None:
    await setup.node(CPU=2)
    await setup.lead()
    await setup.ask(2, CPU=1)
    del setup.gcs.jobs["job_1"]
    await setup.gcs.forget()

    async def all_free() -> bool:
        return (await setup.resources()).available["CPU"] == 2

    await until(all_free)


async def test_a_finished_job_frees_everything_it_held(setup: Setup) -> None:
    nodelet = await setup.node(CPU=2)
    await setup.lead()
    await setup.ask(2, CPU=1)
    waiting = asyncio.create_task(setup.ask(CPU=1))
    await asyncio.sleep(0)
    await setup.gcs.tell("job.finished", "job_1")
    with pytest.raises(Exception, match="job_1 is finished"):
        await waiting

    async def all_free() -> bool:
        return (await setup.resources()).available["CPU"] == 2

    await until(all_free)
    assert all(order.kill for order in nodelet.released if order.lease_ids)


async def test_requests_of_a_job_that_ended_before_this_leader_began_are_refused(
    setup: Setup,
) -> None:
    await setup.node(CPU=2)
    setup.gcs.jobs["job_3"] = msgspec.structs.replace(a_job("job_3"), state=JobState.FAILED)
    await setup.lead()
    with pytest.raises(StokerError, match="job_3 is finished"):
        await setup.ask(CPU=1, job="job_3")
    assert len((await setup.ask(CPU=1, job="job_that_the_gcs_tells_of_late")).granted) == 1


async def test_a_node_that_refuses_the_work_of_a_finished_job_goes_on_with_that_of_others(
    setup: Setup,
) -> None:
    nodelet = await setup.node(CPU=2)
    await setup.lead()
    nodelet.fail_next.append(JobFinishedError("job_1 has finished"))
    with pytest.raises(JobFinishedError, match="job_1 is finished"):
        await setup.ask(CPU=1)
    engine_now = setup.running._engine
    assert engine_now is not None
    assert not engine_now.state.nodes[nodelet.node_id].backoffs, "the node is not to blame"
    assert len((await setup.ask(CPU=1, job="job_2")).granted) == 1


async def test_a_node_that_answers_late_takes_nothing_before_its_leases_are_adopted(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodelet = await setup.node(CPU=2)
    await setup.lead()
    held = ids(await setup.ask(2, CPU=1))
    await setup.running.stop()
    answers, real = asyncio.Event(), NodeletClients.held

    async def late(self: NodeletClients, node: Node) -> HeldLeases:
        await answers.wait()
        return await real(self, node)

    monkeypatch.setattr(NodeletClients, "held", late)
    monkeypatch.setattr(gcs_feed, "ADOPTION_TIMEOUT_S", 0.05)
    await setup.lead()
    options = {"on_infeasible": OnInfeasible.WAIT}
    waiting = asyncio.create_task(setup.ask(CPU=1, options=options))

    async def queued() -> bool:
        path = "/v1/queue"
        return bool((await setup.client.call("GET", path, reply=Page[QueueEntry])).items)

    async def adopted() -> bool:
        return {one.lease_id for one in await setup.leases()} >= set(held)

    await until(queued)
    answers.set()
    await until(adopted)
    assert set(nodelet.held) == set(held)
    await setup.release(held[0])
    assert len((await waiting).granted) == 1


async def test_the_driver_of_the_next_attempt_is_asked_for_before_the_event_of_it(
    setup: Setup,
) -> None:
    nodelet = await setup.node(CPU=2)
    await setup.lead()
    before = ids(await setup.ask(2, CPU=1))
    waiting = asyncio.create_task(setup.ask(CPU=1))
    await asyncio.sleep(0)
    driver = LeaseRequest(
        request_id="r_driver.2",
        owner_id="gcs",
        demand=Demand(job_id="job_1", resources={"CPU": 2}, kind=LeaseKind.DRIVER),
        driver=DriverSpec(job_id="job_1", entrypoint="x", attempt=2),
        wait_s=20.0,
    )
    granted = await setup.client.call("POST", "/v1/leases", driver, reply=LeaseReply)
    with pytest.raises(StokerError, match="job_1 is finished"):
        await waiting
    assert len(granted.granted) == 1
    assert {one for order in nodelet.released for one in order.lease_ids} == set(before)
    await setup.gcs.tell("job.retrying", "job_1", a_job("job_1", attempt=2))
    await setup.gcs.tell("job.started", "job_2", a_job("job_2"))
    later = await setup.ask(CPU=1, job="job_2", wait_s=0.1)
    assert later.granted == (), "the driver still has its CPUs"
    assert [lease.lease_id for lease in await setup.leases()] == ids(granted)


async def test_worker_exits_and_node_deaths_are_losses(setup: Setup) -> None:
    nodelet = await setup.node(CPU=1)
    await setup.lead()
    (lease_id,) = ids(await setup.ask(CPU=1))
    await setup.gcs.tell("worker.exited", "w_1", nodelet.exit_of(lease_id))
    assert (await setup.poll("p_1", wait_s=20)).lost == (lease_id,)
    (lease_id,) = ids(await setup.ask(CPU=1))
    dead = msgspec.structs.replace(nodelet.node, state="DEAD", reason="silent for 10 s")
    await setup.gcs.tell("node.died", "n_1", dead)
    assert (await setup.poll("p_1", lease_id, wait_s=20)).lost == (lease_id,)
    assert (await setup.resources()).total == {}


async def test_a_new_scheduler_adopts_what_nodelets_hold(setup: Setup) -> None:
    await setup.node(CPU=2, GPU=1)
    await setup.lead()
    (lease_id,) = ids(await setup.ask(CPU=1, GPU=1))
    await setup.running.stop()
    setup.gcs.leader = None
    await setup.lead()
    assert [lease.lease_id for lease in await setup.leases()] == [lease_id]
    assert (await setup.poll("p_1", lease_id)).lost == ()
    assert (await setup.resources()).available["GPU"] == 0
    assert (await setup.ask(GPU=1, owner="p_2", wait_s=0.05)).granted == ()


async def test_a_standby_names_the_leader_and_takes_over(setup: Setup) -> None:
    nodelet = await setup.node(CPU=2)
    await setup.lead()
    standby = await setup.scheduler()
    client = setup.client_of(standby)

    async def knows() -> bool:
        try:
            await client.call("GET", "/v1/resources", reply=ClusterResources, retry=False)
        except NotLeaderError as error:
            return bool(error.extra["leader"] == setup.running.url)
        except Exception:
            return False
        return False

    await until(knows)
    await setup.running.stop()
    await standby.until_leads(40)
    setup.client = client
    await setup.ask(CPU=1)
    assert nodelet.epoch == 2


async def test_a_plan_is_what_asking_would_do_and_takes_nothing(setup: Setup) -> None:
    await setup.node(CPU=1)
    await setup.node(CPU=4, GPU=2)
    await setup.lead()
    demands = [Demand(job_id="job_1", resources=r) for r in ({"CPU": 1}, {"CPU": 1}, {"GPU": 3})]
    made = await setup.client.call(
        "POST", "/v1/plan", PlanRequest(demands=tuple(demands)), reply=PlanReply
    )
    assert [p.node_id for p in made.placements] == ["n_1", "n_2", None]
    assert {v.fit for v in made.placements[2].verdicts} == {Fit.NEVER}
    outcomes = [placement.outcome for placement in made.placements]
    assert outcomes == [PlanOutcome.STARTS, PlanOutcome.STARTS, PlanOutcome.REJECTED]
    assert made.placements[2].remedies[0].text == "it starts if a node with 3 GPU joins"
    assert (await setup.ask(CPU=1)).granted[0].lease.node_id == "n_1"


async def test_a_plan_of_a_gang_goes_where_its_bundles_would_be_held(setup: Setup) -> None:
    await setup.node(CPU=2, GPU=2)
    await setup.node(CPU=2, GPU=2)
    await setup.lead()
    bundles = (Bundle(resources={"GPU": 2.0}),) * 2
    request = PlanRequest(bundles=bundles, strategy=GroupStrategy.STRICT_SPREAD)
    (made,) = (await setup.client.call("POST", "/v1/plan", request, reply=PlanReply)).placements
    assert made.outcome is PlanOutcome.STARTS
    assert {one.node_id: one.gpus for one in made.bundles} == {
        "n_1": {0: 1.0, 1: 1.0},
        "n_2": {0: 1.0, 1: 1.0},
    }
    (held,) = ids(await setup.ask(GPU=1))
    (made,) = (await setup.client.call("POST", "/v1/plan", request, reply=PlanReply)).placements
    assert made.outcome is PlanOutcome.WAITS and made.constraint is not None
    assert made.remedies[0].lease_ids == (held,)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (PlanRequest(), "demands"),
        (
            PlanRequest(demands=(Demand(job_id="", resources={"GPU": 1.5}),)),
            "demands.0.resources.GPU",
        ),
        (PlanRequest(bundles=(Bundle(resources={}),)), "bundles.0"),
    ],
)
async def test_a_plan_of_nothing_that_could_be_asked_for_is_refused(
    setup: Setup, body: PlanRequest, field: str
) -> None:
    await setup.lead()
    with pytest.raises(BadRequestError) as caught:
        await setup.client.call("POST", "/v1/plan", body, reply=PlanReply)
    assert caught.value.field == field


async def test_a_plan_whose_copy_would_hold_the_scheduler_up_is_refused(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await setup.node(CPU=1)
    await setup.lead()
    monkeypatch.setattr(api, "MAX_PLANNED_SIZE", 0)
    body = PlanRequest(demands=(Demand(job_id="", resources={"CPU": 1}),))
    with pytest.raises(UnavailableError, match="1 nodes, leases and requests"):
        await setup.client.call("POST", "/v1/plan", body, reply=PlanReply, retry=False)


async def test_an_explanation_looks_for_remedies_when_asked_to(setup: Setup) -> None:
    await setup.node(CPU=1)
    await setup.lead()
    (held,) = ids(await setup.ask(CPU=1))
    demand = Demand(job_id="job_1", resources={"CPU": 1}, name="train")
    for remedies in (False, True):
        told = await setup.client.call(
            "POST", "/v1/explain", demand, reply=Explanation, query={"remedies": remedies}
        )
        assert told.constraint is not None and told.constraint.kind is ConstraintKind.CAPACITY
        assert [holder.lease_id for holder in told.holders] == [held]
        assert [one.lease_ids for one in told.remedies] == ([(held,), ()] if remedies else [])


async def test_a_job_has_no_say_in_the_leases_of_another(setup: Setup) -> None:
    await setup.node(CPU=4.0)
    await setup.lead()
    [lease] = (await setup.ask(CPU=1.0)).granted
    root, lease_id = setup.client, lease.lease.lease_id
    token = TokenSigner(TOKEN).job("job_2")
    setup.client = Client(setup.running.url, token=token, peer="test", settings=setup.settings)
    setup.stack.push_async_callback(setup.client.close)
    with pytest.raises(ForbiddenError, match="job job_2 may not ask for leases of job_1"):
        await setup.ask(CPU=1.0)
    for intrusion in (
        setup.release(lease_id),
        setup.poll("p_1"),
        setup.client.call("POST", f"/v1/leases/{lease_id}/blocked", BlockLease(blocked=True)),
    ):
        with pytest.raises(ForbiddenError, match=f"{lease_id} is not job job_2's"):
            await intrusion
    spec = ActorSpec(actor_id="a_1", incarnation=0, class_name="A", payload=b"")
    request = LeaseRequest(
        request_id="r_x", owner_id="p_2", demand=Demand(job_id="job_2", resources={}), actor=spec
    )
    with pytest.raises(ForbiddenError, match="may not start actors and drivers"):
        await setup.client.call("POST", "/v1/leases", request)
    [own] = (await setup.ask(job="job_2", owner="p_2", CPU=1.0)).granted
    await setup.release(own.lease.lease_id)
    setup.client = root
    assert lease_id in {one.lease_id for one in await setup.leases()}
