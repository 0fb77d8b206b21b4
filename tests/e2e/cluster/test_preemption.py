"""Preemption end to end: a notice, a checkpoint, the end, and another run that costs no retry."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError, NotFoundError
from tests.e2e._cluster import actor_record
from tests.e2e.conftest import Flags, get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import Cluster

SLOT = {"num_cpus": 0, "resources": {"disk": 2}}


@pytest.fixture(autouse=True)
def all_went_back(cluster: Cluster) -> Iterator[None]:
    yield
    until(cluster.is_idle, 40, "all leases went back")


@stoker.remote(**SLOT, priority=5)
def urgent() -> str:
    return "done"


def test_a_task_saves_a_checkpoint_as_it_gives_way_and_resumes_from_it_uncharged(
    cluster: Cluster, flags: Flags
) -> None:
    @stoker.remote(**SLOT, preemptible=True, max_retries=0)
    def train() -> tuple[int, int]:
        step = int(flags.wait("checkpoint")) if flags.is_up("checkpoint") else 0

        @stoker.on_stop
        def save(notice: stoker.PreemptionNotice) -> None:
            flags.raise_("reason", notice.reason)
            flags.raise_("checkpoint", 7)

        flags.raise_(f"from-{step}")
        if step == 0:
            time.sleep(600)
        return step, stoker.get_runtime_context().attempt

    low = train.remote()
    flags.wait("from-0")
    assert get(urgent.remote()) == "done"
    assert get(low) == (7, 1), "it went on from its checkpoint, although max_retries is 0"
    reason = flags.wait("reason")
    assert "preempted on node" in reason and "urgent" in reason and "of priority 5" in reason


def test_a_task_that_ignores_everything_is_killed_when_its_grace_has_passed(flags: Flags) -> None:
    @stoker.remote(**SLOT, preemptible=True, preemption_grace=0.2)
    def stubborn() -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        attempt = stoker.get_runtime_context().attempt
        flags.raise_(f"attempt-{attempt}")
        while attempt == 0:
            time.sleep(600)
        return attempt

    low = stubborn.remote()
    flags.wait("attempt-0")
    assert get(urgent.remote()) == "done"
    assert get(low) == 1


class _Ledger:
    def __init__(self) -> None:
        self.count = 0

    def add(self, running: Flags | None = None) -> int:
        if running is not None:
            running.raise_("running")
            assert stoker.preemption_notice().wait(30), "a notice"
        self.count += 1
        return self.count

    def __stoker_save__(self) -> int:
        return self.count

    def __stoker_restore__(self, state: int) -> None:
        self.count = state


class _AsyncLedger:
    def __init__(self) -> None:
        self.count = 0

    async def add(self, running: Flags | None = None) -> int:
        if running is not None:
            running.raise_("running")
            await stoker.preemption_notice()
        self.count += 1
        return self.count

    async def __stoker_save__(self) -> int:
        return self.count

    def __stoker_restore__(self, state: int) -> None:
        self.count = state


@pytest.mark.parametrize(
    ("cls", "options"),
    [(_Ledger, {}), (_Ledger, {"max_concurrency": 4}), (_AsyncLedger, {})],
    ids=["sync", "threads", "async"],
)
def test_an_actor_that_gives_way_saves_its_state_after_the_call_that_runs(
    cls: type, options: dict[str, Any], flags: Flags
) -> None:
    made = stoker.remote(**SLOT, preemptible=True, save_interval_s=None, **options)(cls)
    ledger = made.remote()
    assert [get(ledger.add.remote()) for _ in range(3)] == [1, 2, 3]
    last = ledger.add.remote(running=flags)
    flags.wait("running")  # a call that has not begun by the notice goes to the next incarnation
    assert get(urgent.remote()) == "done"
    assert get(last) == 4
    assert get(ledger.add.remote()) == 5
    record = actor_record(ledger._info.actor_id)
    assert (record["restarts"], record["preemptions"]) == (0, 1)
    stoker.kill(ledger)


def test_a_task_that_ends_within_its_grace_has_not_been_preempted(flags: Flags) -> None:
    @stoker.remote(**SLOT, preemptible=True)
    def polite() -> int:
        flags.raise_("running")
        notice = stoker.preemption_notice()
        assert notice.wait(30), "a notice"
        assert notice.is_set() and notice.deadline_s is not None
        assert notice.deadline_s > time.time()
        return stoker.get_runtime_context().attempt

    low = polite.remote()
    flags.wait("running")
    assert get(urgent.remote()) == "done"
    assert get(low) == 0


def test_background_work_has_the_idle_part_of_a_gpu_until_other_work_needs_it(
    cluster: Cluster, flags: Flags
) -> None:
    @stoker.remote(num_cpus=0, num_gpus=0.5, background=True, max_retries=0)
    def fill() -> int:
        attempt = stoker.get_runtime_context().attempt
        flags.raise_(f"attempt-{attempt}")
        while attempt == 0:
            time.sleep(600)
        return attempt

    @stoker.remote(num_cpus=0, num_gpus=2)
    def train() -> int:
        return len(stoker.get_gpu_ids())

    low = fill.remote()
    flags.wait("attempt-0")
    assert get(train.remote()) == 2
    assert get(low) == 1, "it ran again where there was room, and was not charged"
    group = stoker.placement_group([{"GPU": 1}])
    with pytest.raises(BadRequestError, match="has its bundle for itself"):
        fill.options(scheduling_strategy=stoker.PlacementGroupSchedulingStrategy(group))
    stoker.remove_placement_group(group)


def test_a_task_that_is_not_preemptible_finishes_first(flags: Flags) -> None:
    @stoker.remote(**SLOT)
    def slow() -> bool:
        flags.raise_("running")
        flags.wait("go")
        return stoker.preemption_notice().is_set()

    low = slow.remote()
    flags.wait("running")
    high = urgent.remote()
    assert stoker.wait([high], timeout=0.5)[0] == []
    flags.raise_("go")
    assert get([low, high]) == [False, "done"]


def test_an_actor_moves_and_keeps_its_restarts(flags: Flags) -> None:
    @stoker.remote(**SLOT, preemptible=True, max_restarts=0, max_task_retries=-1)
    class Counter:
        def __init__(self) -> None:
            self.count = int(flags.wait("count")) if flags.is_up("count") else 0

            @stoker.on_stop
            async def save(notice: stoker.PreemptionNotice) -> None:
                await asyncio.sleep(0)
                flags.raise_("count", self.count)

        def add(self) -> tuple[int, int]:
            self.count += 1
            return self.count, os.getpid()

    counter = Counter.remote()
    (_, first_pid), (count, _) = get([counter.add.remote(), counter.add.remote()])
    assert count == 2
    assert get(urgent.remote()) == "done"
    count, pid = get(counter.add.remote())
    assert (count, pid != first_pid) == (3, True)
    stoker.kill(counter)


def test_a_call_of_a_preempted_actor_runs_again_uncharged(cluster: Cluster, flags: Flags) -> None:
    @stoker.remote(**SLOT, preemptible=True, preemption_grace=0.2, max_task_retries=0)
    class Trainer:
        def step(self) -> int:
            attempt = stoker.get_runtime_context().attempt
            flags.raise_(f"step-{attempt}")
            while attempt == 0:
                time.sleep(600)
            return attempt

        def after(self) -> str:
            return "after"

    trainer = Trainer.remote()
    step, after = trainer.step.remote(), trainer.after.remote()
    flags.wait("step-0")
    assert get(urgent.remote()) == "done"
    assert get([step, after]) == [1, "after"]

    def codes() -> list[str | None]:
        try:
            attempts = cluster.call("GET", f"/v1/tasks/{step.task_id}/attempts")["items"]
        except NotFoundError:  # it has not come yet
            return []
        return [(one.get("error") or {}).get("code") for one in attempts]

    until(lambda: "preempted" in codes(), 40, "the preempted attempt is recorded")
    stoker.kill(trainer)


def test_callbacks_run_when_an_actor_is_killed_and_when_a_task_is_cancelled_by_force(
    flags: Flags,
) -> None:
    @stoker.remote
    class Keeper:
        def keep(self) -> None:
            stoker.on_stop(lambda notice: flags.raise_("kept", notice.reason))

    keeper = Keeper.remote()
    get(keeper.keep.remote())
    stoker.kill(keeper)
    assert flags.wait("kept")

    @stoker.remote
    def endless() -> None:
        stoker.on_stop(lambda notice: flags.raise_("cancelled", notice.reason))
        flags.raise_("endless")
        time.sleep(600)

    ref = endless.remote()
    flags.wait("endless")
    stoker.cancel(ref, force=True)
    with pytest.raises(stoker.exceptions.TaskCancelledError):
        get(ref)
    assert "was cancelled" in flags.wait("cancelled")


def test_a_callback_that_fails_keeps_no_other_from_running(flags: Flags) -> None:
    @stoker.remote(**SLOT, preemptible=True)
    def train() -> int:
        @stoker.on_stop
        def broken(notice: stoker.PreemptionNotice) -> None:
            raise ValueError("no disk")

        stoker.on_stop(lambda notice: flags.raise_("saved"))
        flags.raise_("running")
        while not flags.is_up("saved"):
            time.sleep(0.1)
        time.sleep(0 if stoker.get_runtime_context().attempt else 600)
        return stoker.get_runtime_context().attempt

    low = train.remote()
    flags.wait("running")
    assert get([urgent.remote(), low]) == ["done", 1]


def test_a_placement_group_gives_way_whole_and_comes_back_with_its_work(flags: Flags) -> None:
    group = stoker.placement_group(
        [{"disk": 1}, {"disk": 1}], preemptible=True, preemption_grace=30
    )
    inside = stoker.PlacementGroupSchedulingStrategy(group, 1)

    @stoker.remote(num_cpus=0, resources={"disk": 1}, scheduling_strategy=inside, max_retries=0)
    def work() -> int:
        attempt = stoker.get_runtime_context().attempt
        stoker.on_stop(lambda notice: flags.raise_("saved", notice.reason))
        flags.raise_(f"attempt-{attempt}")
        while attempt == 0:
            time.sleep(600)
        return attempt

    low = work.remote()
    flags.wait("attempt-0")
    assert get(urgent.remote()) == "done"
    assert get(low) == 1
    assert "preempted on node" in flags.wait("saved")
    record = stoker.placement_group_table(group)
    assert (record["preemptions"], record["state"]) == (1, "CREATED")
    stoker.remove_placement_group(group)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"preemptible": "yes"}, "preemptible"),
        ({"preemptible": True, "preemption_grace": 1e6}, "preemption_grace"),
        ({"preemptible": True, "preemption_grace": -1}, "preemption_grace"),
    ],
    ids=str,
)
def test_senseless_options_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequestError) as error:
        stoker.remote(**options)(lambda: None)
    assert error.value.field == field
