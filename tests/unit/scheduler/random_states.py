"""Cores in a state that a seed made: nodes, queues with limits, owners that ask, hold, idle and return."""

from __future__ import annotations

from random import Random

from stoker_scheduler.core import events as ev
from stoker_scheduler.core.leases.lease import Phase
from stoker_scheduler.core.model.gangs import Gang, GangStrategy, make_gang
from stoker_scheduler.core.model.queues import QueueSpec
from stoker_scheduler.core.model.requirements import Requirements, make_requirements
from stoker_scheduler.core.model.resources import to_units
from tests.unit.scheduler.core_driver import Core

NODES: tuple[dict[str, float], ...] = (
    {"CPU": 4.0},
    {"CPU": 8.0, "GPU": 2.0},
    {"CPU": 4.0, "GPU": 4.0},
)
NEEDS: tuple[dict[str, float], ...] = (
    {"CPU": 1},
    {"CPU": 3},
    {"GPU": 1},
    {"GPU": 0.5},
    {"CPU": 2, "GPU": 2},
    {"CPU": 4, "GPU": 4},
    {"GPU": 8},
)
BUNDLES: tuple[dict[str, float], ...] = ({"CPU": 1}, {"GPU": 1}, {"CPU": 1, "GPU": 2})
QUEUES = ("default", "team", "team.a")


def random_core(seed: int) -> tuple[Core, Random]:
    """Return a core in which a lot has happened, and the random numbers to go on with."""
    random = Random(seed)
    core = Core(*random.choices(NODES, k=random.randint(1, 4)))
    if random.random() < 0.7:
        core.feed(ev.QueuesChanged(at_s=0.0, queues=_queues(random)))
    for number in range(random.randint(5, 40)):
        _happens(core, random, number)
    return core, random


def random_request(
    core: Core, random: Random, request_id: str, owner: str, **options: object
) -> ev.LeaseRequested:
    """Return a request that the core has not seen; of a gang now and then."""
    requirements: Requirements | Gang = make_requirements(random.choice(NEEDS))
    group: dict[str, object] = {}
    if random.random() < 0.25:
        bundles = [make_requirements(random.choice(BUNDLES)) for _ in range(random.randint(1, 3))]
        requirements = make_gang(bundles, random.choice(list(GangStrategy)))
        group = {
            "kind": ev.Kind.BUNDLE,
            "group_id": f"pg_{request_id}",
            "indices": tuple(range(len(bundles))),
        }
    elif random.random() < 0.2:
        group = {"kind": ev.Kind.ACTOR}
    queue = random.choice(QUEUES)
    fields: dict[str, object] = {
        "at_s": core.at_s,
        "request_id": request_id,
        "owner_id": owner,
        "job_id": f"job_{queue}",
        "requirements": requirements,
        "class_key": f"{requirements.text} {owner}",
        "count": 1,
        "deadline_s": core.at_s + 1000.0,
        "priority": random.choice([0, 0, 0, 1, 3]),
        "wait_if_infeasible": True,
        "user": random.choice(["ann", "bob"]),
        "queue": queue,
        **group,
        **options,
    }
    return ev.LeaseRequested(**fields)  # type: ignore[arg-type]


def add_group(core: Core, request: ev.LeaseRequested) -> None:
    """Let the core know of the placement group that a request is for."""
    if isinstance(request.requirements, Gang):
        core.feed(
            ev.GroupAdded(
                at_s=core.at_s,
                group_id=request.group_id,
                job_id=request.job_id,
                gang=request.requirements,
            )
        )


def _queues(random: Random) -> tuple[QueueSpec, ...]:
    specs = []
    for name in QUEUES:
        amounts = [{"CPU": 4.0}, {"CPU": 6.0, "GPU": 1.0}, {"GPU": 2.0}]
        limits = {
            limit: to_units(random.choice(amounts))
            for limit in ("quota", "limit", "user_limit", "job_limit")
            if random.random() < 0.25
        }
        parent = "team" if name == "team.a" else ""
        rate = random.choice([0.0, 0.0, 0.0, 2.0])
        stopped = random.random() < 0.08
        weight = random.choice([0.5, 1.0, 3.0])
        specs.append(
            QueueSpec(
                name=name, parent=parent, weight=weight, rate_limit=rate, stopped=stopped, **limits
            )
        )
    return tuple(specs)


def _happens(core: Core, random: Random, number: int) -> None:
    roll, held = random.random(), _held(core)
    if roll < 0.55:
        owner = f"p_{random.randrange(5)}"
        request = random_request(core, random, f"r_{number}", owner, count=random.randint(1, 4))
        if isinstance(request.requirements, Gang):
            request = random_request(core, random, f"r_{number}", "gcs")
        add_group(core, request)
        core.feed(request)
    elif roll < 0.7 and held:
        core.release(random.choice(held))
    elif roll < 0.8 and held:
        lease = core.state.leases[random.choice(held)]
        core.poll(lease.owner_id, lease.lease_id, idle=(lease.lease_id,))
    elif roll < 0.85 and held:
        core.feed(ev.LeaseBlocked(at_s=core.at_s, lease_id=random.choice(held)))
    else:
        core.wait(random.choice([0.25, 1.0, 6.0]))


def _held(core: Core) -> list[str]:
    return [
        lease.lease_id
        for lease in core.state.leases.values()
        if lease.phase is Phase.HELD and lease.kind is not ev.Kind.BUNDLE
    ]
