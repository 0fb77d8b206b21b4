"""What a drain does with placement groups, drivers, owners and actors: until its deadline, and at it."""

from __future__ import annotations

import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import stoker
from stoker import PlacementGroupSchedulingStrategy
from stoker.exceptions import ActorUnavailableError, OwnerDiedError
from stoker.jobs import JobState, JobSubmissionClient
from stoker_gcs.controllers.drains import ENDED_S
from tests.e2e import _cluster
from tests.e2e._site import HERE, WAIT_S, Site, site_of
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEAT = {"seat": 1}
FAR_S = 600.0
"""A deadline that no test reaches."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_of(tmp_path_factory.mktemp("drain"), share=False) as made:
        yield made


@stoker.remote(**HERE, max_retries=0)
def node_when(flags: Flags, go: str) -> str:
    flags.note("runs", go)
    flags.wait(go)
    return str(stoker.get_runtime_context().node_id)


@stoker.remote(**HERE, max_restarts=1, max_task_retries=0)
class Member:
    def node(self) -> str:
        return str(stoker.get_runtime_context().node_id)

    def node_when(self, flags: Flags, go: str) -> str:
        flags.note("calls", self.node())
        flags.wait(go)
        return self.node()


def within(group: stoker.PlacementGroup, index: int = 0) -> dict[str, Any]:
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}


def nodes_of(group: stoker.PlacementGroup) -> set[str]:
    """The nodes of a group that is placed, else none."""
    record = stoker.placement_group_table(group)
    placed = record["state"] == "CREATED"
    return {one["node_id"] for one in record["placements"].values()} if placed else set()


@pytest.mark.parametrize("reschedule", ["group", "bundles"])
def test_a_placement_group_is_placed_elsewhere_once_nothing_runs_in_it(
    site: Site, flags: Flags, reschedule: str
) -> None:
    old = site.add(f"old-{reschedule}")
    group = stoker.placement_group([SEAT, SEAT], reschedule=reschedule)
    idle = stoker.placement_group([SEAT], reschedule=reschedule)
    assert group.wait(WAIT_S) and idle.wait(WAIT_S)
    member = Member.options(**within(group)).remote()
    assert get(member.node.remote()) == old
    running = node_when.options(**within(group, 1)).remote(flags, "go")
    until(lambda: flags.notes("runs"), WAIT_S, "a task runs in it")
    new = site.add(f"new-{reschedule}")
    site.drain(old, FAR_S)
    until(lambda: nodes_of(idle) == {new}, WAIT_S, "the group that nobody uses is placed elsewhere")
    status = site.status(old)
    left = [one for one in status["left"] if one["kind"] == "bundle"]
    assert {one["id"] for one in left} == {group.id}, (
        f"the other stays while the task runs: {status}"
    )
    flags.raise_("go")
    assert get(running) == old
    until(lambda: nodes_of(group) == {new}, WAIT_S, "it is placed elsewhere as well")
    site.until_gone(f"old-{reschedule}", old)
    assert get(member.node.remote()) == new
    actor = _cluster.actor_record(member._info.actor_id)
    assert (actor["restarts"], actor["preemptions"]) == (0, 1), "it used up no restart"
    stoker.kill(member)
    for one in (group, idle):
        assert stoker.placement_group_table(one)["reschedules"] == 1
        stoker.remove_placement_group(one)
    site.drain(new, 0.0)
    site.until_gone(f"new-{reschedule}", new)


@pytest.mark.parametrize("reschedule", ["group", "bundles"])
def test_a_group_that_is_used_is_moved_at_the_deadline_as_after_the_loss_of_its_node(
    site: Site, flags: Flags, reschedule: str
) -> None:
    old, stays = site.add(f"one-{reschedule}"), site.add(f"two-{reschedule}")
    group = stoker.placement_group([SEAT] * 2, strategy="STRICT_SPREAD", reschedule=reschedule)
    assert group.wait(WAIT_S)
    members = [Member.options(**within(group, index)).remote() for index in range(2)]
    if get(members[0].node.remote()) != old:
        members.reverse()
    leaves, elsewhere = members
    assert [get(one.node.remote()) for one in members] == [old, stays]
    call = elsewhere.node_when.remote(flags, "never" if reschedule == "group" else "go")
    until(lambda: flags.notes("calls") == [stays], WAIT_S, "a bundle of another node is used")
    new = site.add(f"three-{reschedule}")
    site.drain(old, 3.0)
    site.until_gone(f"one-{reschedule}", old)
    until(lambda: nodes_of(group) == {stays, new}, WAIT_S, "the group is whole again")
    assert get(leaves.node.remote()) in (stays, new)
    if reschedule == "bundles":
        flags.raise_("go")
        assert get(call) == stays, "the other bundle was left alone"
    else:
        _cluster.caught(lambda: get(call), ActorUnavailableError)
        assert get(elsewhere.node.remote()) in (stays, new)
    record = _cluster.actor_record(leaves._info.actor_id)
    assert (record["restarts"], record["preemptions"]) == (0, 1), record
    for member in members:
        stoker.kill(member)
    stoker.remove_placement_group(group)
    for name, node_id in ((f"two-{reschedule}", stays), (f"three-{reschedule}", new)):
        site.drain(node_id, 0.0)
        site.until_gone(name, node_id)


def submit_endless(site: Site, folder: Path) -> tuple[JobSubmissionClient, str]:
    """Submit a job whose first attempt never ends; return a client and its id once it runs."""
    program = folder / "main.py"
    program.write_text(
        textwrap.dedent(
            """
            import os, time
            print(os.environ["STOKER_NODE_ID"], flush=True)
            time.sleep(600 if os.environ["STOKER_JOB_ATTEMPT"] == "1" else 0)
            """
        )
    )
    client = JobSubmissionClient(site.cluster.info.gcs_url, site.cluster.info.token)
    job_id = client.submit_job(
        entrypoint=f"exec {sys.executable} {program}", entrypoint_resources=SEAT
    )
    until(lambda: client.get_job_logs(job_id), WAIT_S, "it runs")
    return client, job_id


def test_what_runs_over_the_deadline_runs_again_elsewhere_and_uses_up_nothing(
    site: Site, flags: Flags
) -> None:
    old = site.add("over")
    client, job_id = submit_endless(site, flags.folder)
    members = [Member.options(max_task_retries=retries).remote() for retries in (0, 1)]
    crashed, tried_again = [one.node_when.remote(flags, "go") for one in members]
    until(lambda: flags.notes("calls") == [old] * 2, WAIT_S, "both calls run")
    new = site.add("under")
    site.drain(old, 3.0)
    site.until_gone("over", old)
    job = client.wait(job_id, timeout_s=WAIT_S)
    assert job.state is JobState.SUCCEEDED, job
    assert ([one.node_id for one in job.attempts], job.node_id) == ([old], new)
    assert "is drained by cluster until" in job.attempts[0].cause
    error = _cluster.caught(lambda: get(crashed), ActorUnavailableError)
    assert "its calls had not finished by then" in str(error), error
    until(lambda: flags.notes("calls")[2:] == [new], WAIT_S, "the call that may run again does")
    flags.raise_("go")
    assert get(tried_again) == new
    for member in members:
        assert get(member.node.remote()) == new
        record = _cluster.actor_record(member._info.actor_id)
        assert (record["restarts"], record["preemptions"]) == (0, 1), record
        stoker.kill(member)
    site.drain(new, 0.0)
    site.until_gone("under", new)


def test_an_owner_stays_while_others_need_what_it_owns_and_ends_at_the_deadline(site: Site) -> None:
    node_id = site.add("owner")

    @stoker.remote(**HERE)
    def owner() -> list[Any]:
        return [stoker.put(np.full(1 << 18, number, dtype=np.int32)) for number in (1, 2)]

    needed, dropped = get(owner.remote())
    del dropped
    site.drain(node_id, FAR_S)
    until(
        lambda: [one["kind"] for one in site.status(node_id)["left"]] == ["worker", "objects"],
        WAIT_S,
        "it stays for what it owns",
    )
    assert int(get(needed)[-1]) == 1
    site.drain(node_id, 0.5)
    began_s = time.monotonic()
    site.until_gone("owner", node_id)
    assert time.monotonic() - began_s < ENDED_S, "it was ended at the deadline"
    error = _cluster.caught(lambda: get(needed), OwnerDiedError)
    assert "its owner" in str(error), error
