"""The operator's half of a simulated cluster: queues that are made, changed, stopped and dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_scheduler.core.model.queues import DEFAULT_QUEUE, QueueSpec
from stoker_scheduler.core.model.resources import to_units

if TYPE_CHECKING:
    from random import Random

    from stoker_scheduler.core.leases.lease import LeaseState
    from stoker_scheduler.core.state import State

QUEUES = {"job_0": DEFAULT_QUEUE, "job_1": "team", "job_2": "team.a", "job_3": "team.b"}
"""Job -> its queue."""
USERS = {"job_0": "ann", "job_1": "ann", "job_2": "bob", "job_3": "ann"}


def random_queues(random: Random, *, calm: bool = False) -> tuple[QueueSpec, ...]:
    """Return some queues with limits at random; when ``calm``, none that could hold work for ever."""
    specs = []
    for name in dict.fromkeys(QUEUES.values()):
        if random.random() < 0.2:
            continue
        limits = {
            limit: to_units(random.choice([{"CPU": 4.0}, {"CPU": 6.0, "GPU": 1.0}, {"GPU": 2.0}]))
            for limit in ("quota", "limit", "user_limit", "job_limit")
            if random.random() < 0.3
        }
        specs.append(
            QueueSpec(
                name=name,
                parent="team" if name.startswith("team.") and random.random() < 0.8 else "",
                weight=random.choice([0.5, 1.0, 1.0, 3.0]),
                rate_limit=random.choice([0.0, 0.0, 0.0, 2.0, 10.0]),
                stopped=not calm and random.random() < 0.1,
                **limits,
            )
        )
    return tuple(specs)


def check_limits(state: State, lease: LeaseState) -> None:
    """Check that a lease that just started is within the limits of its queue and those above."""
    if lease.in_bundle:
        return
    account = lease.account
    path = state.tenants.path(account.queue)
    of_leaf = [
        (path[0].by_user.get(account.user, {}), path[0].spec.user_limit),
        (path[0].by_job.get(account.job_id, {}), path[0].spec.job_limit),
    ]
    assert not any(queue.spec.stopped for queue in path), f"{lease.lease_id} is of a stopped queue"
    for usage, limits in [*of_leaf, *((queue.usage, queue.spec.limit) for queue in path)]:
        for name, units in () if lease.requirements.background else lease.requirements.vector:
            most = limits.get(name)
            used = usage.get(name, 0)
            assert most is None or used <= most, (
                f"{lease.lease_id}: {used} of {most} {name} ({units})"
            )
