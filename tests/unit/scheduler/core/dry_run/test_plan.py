"""Plans: what they say is what then happens, and they change nothing."""

from __future__ import annotations

from collections import Counter

import pytest

from stoker_scheduler.core import commands as cmd
from stoker_scheduler.core import events as ev
from stoker_scheduler.core.dry_run.fork import fork
from stoker_scheduler.core.dry_run.plan import Outcome, Planned, plan
from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.requirements import make_requirements
from stoker_scheduler.core.model.resources import to_units
from stoker_scheduler.core.queueing.queue import GCS_OWNER
from tests.unit.scheduler.core_driver import Core, of
from tests.unit.scheduler.random_states import add_group, random_core, random_request

SEEDS = 200


def a_request(core: Core, owner: str = "p_x", **options: object) -> ev.LeaseRequested:
    """Return a request that ``core`` has not seen."""
    resources = options.pop("resources", {"CPU": 1})
    requirements = options.pop("requirements", None) or make_requirements(resources)  # type: ignore[arg-type]
    fields = {
        "at_s": core.at_s,
        "request_id": f"r_{owner}",
        "owner_id": owner,
        "job_id": "job_1",
        "requirements": requirements,
        "class_key": owner,
        "count": 1,
        "deadline_s": core.at_s + 1000.0,
        **options,
    }
    return ev.LeaseRequested(**fields)  # type: ignore[arg-type]


def happened(core: Core, request: ev.LeaseRequested) -> Planned:
    """Really make a request of a core, and return what becomes of it, in the words of a plan."""
    state = core.state
    before = state.preemptions.victims(request.requirements)
    done = core.feed(request)
    for wait_s in (0.0, state.policy.preemption_pause_s):
        core.at_s += wait_s
        done += core.feed(ev.Tick(at_s=core.at_s)) if wait_s else []
        rejected = [c for c in of(cmd.Reject, done) if c.request_id == request.request_id]
        if rejected:
            return Planned(Outcome.REJECTED, reason=rejected[0].text)
        leases = [one for one in state.leases.values() if one.request_id == request.request_id]
        if leases:
            return Planned(Outcome.STARTS, _places(leases))
        orders = [i for c in of(cmd.Preempt, done) for i in c.lease_ids]
        ours = [i for i in state.preemptions.victims(request.requirements) if i not in before]
        if ours:
            owned = {i for i in ours if state.leases[i].owner_id != GCS_OWNER}
            assert owned <= set(orders), "their owners are told"
            return Planned(Outcome.PREEMPTS, victims=tuple(state.leases[i] for i in ours))
    return Planned(Outcome.WAITS)


def _places(leases):  # type: ignore[no-untyped-def]
    return tuple((lease.node_id, lease.gpus, lease.bundle) for lease in leases)


def test_a_plan_is_what_then_happens_and_changes_nothing() -> None:
    outcomes: Counter[Outcome] = Counter()
    for seed in range(SEEDS):
        core, random = random_core(seed)
        patient = random.random() < 0.5
        owner = f"p_{random.randrange(7)}"
        request = random_request(core, random, "r_new", owner, wait_if_infeasible=patient)
        add_group(core, request)
        before = core.state.snapshot()
        (planned,) = plan(fork(core.state), [request])
        assert core.state.snapshot() == before, f"seed {seed}: the plan changed the state"
        core.state.check()
        core.slow = True
        real = happened(core, request)
        outcomes[real.outcome] += 1
        assert planned.outcome is real.outcome, f"seed {seed}"
        assert planned.reason == real.reason, f"seed {seed}"
        victims = [lease.lease_id for lease in planned.victims]
        assert victims == [lease.lease_id for lease in real.victims], f"seed {seed}"
        if real.outcome is Outcome.STARTS:
            assert _places(planned.places) == real.places, f"seed {seed}"
        if victims:
            core.slow = False
            core.release(*victims)
            leases = core.state.leases.values()
            started = [one for one in leases if one.request_id == request.request_id]
            assert _places(planned.places) == _places(started), f"seed {seed}"
    assert all(outcomes[outcome] >= SEEDS // 100 for outcome in Outcome), outcomes


def test_requests_of_one_plan_see_each_other() -> None:
    core = Core({"CPU": 2}, {"CPU": 2})
    requests = [a_request(core, f"p_{i}", resources={"CPU": 2}) for i in range(3)]
    planned = plan(fork(core.state), requests)
    assert [one.outcome for one in planned] == [Outcome.STARTS, Outcome.STARTS, Outcome.WAITS]
    assert [place.node_id for one in planned for place in one.places] == ["n_1", "n_2"]
    assert core.state.nodes["n_1"].available == {"CPU": 20_000}


def test_a_plan_names_whom_it_preempts_and_where_it_then_goes() -> None:
    core = Core({"CPU": 4, "GPU": 2})
    core.ask("low", GPU=2)
    core.wait(1)
    (planned,) = plan(fork(core.state), [a_request(core, resources={"GPU": 1}, priority=5)])
    (victim,) = planned.victims
    assert planned.outcome is Outcome.PREEMPTS and victim.owner_id == "low"
    assert [place.node_id for place in planned.places] == ["n_1"]
    assert not any(lease.preempted for lease in core.state.leases.values())


@pytest.mark.parametrize(
    ("queue", "outcome"), [("small", Outcome.REJECTED), ("open", Outcome.STARTS)]
)
def test_a_plan_goes_through_the_limits_of_its_queue(queue: str, outcome: Outcome) -> None:
    core = Core({"CPU": 4})
    specs = (QueueSpec(name="small", limit=to_units({"CPU": 1})), QueueSpec(name="open"))
    core.feed(ev.QueuesChanged(at_s=0.0, queues=specs))
    (planned,) = plan(fork(core.state), [a_request(core, resources={"CPU": 2}, queue=queue)])
    assert planned.outcome is outcome
    assert ("limit of 1 CPU" in planned.reason) == (outcome is Outcome.REJECTED)
