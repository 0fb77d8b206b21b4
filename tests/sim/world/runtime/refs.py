"""The truth about the refs of a world: who holds one, what is read, and what may have been lost.

It stands for ``CURRENT.runtime`` of :mod:`stoker.runtime.objects.refs`, as refs of all processes die in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_wire.ids import task_of
from stoker_wire.messages.data import Failed
from tests.sim.world.checks import BrokenInvariantError
from tests.sim.world.runtime.runtime import TICK_S
from tests.sim.world.runtime.values import is_value_of

if TYPE_CHECKING:
    from stoker.runtime.objects.table import Entry
    from tests.sim.world.loop import Process
    from tests.sim.world.runtime.runtime import Runtime
    from tests.sim.world.world import World

_UNAVAILABLE = frozenset({"object_lost", "object_node_died"})
_DIED = frozenset({"worker_died", "node_died", "preempted"})


class Refs:
    """All entries of a world's object tables."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._runtimes: dict[Entry, Runtime] = {}
        self._holders: dict[str, list[Process]] = {}
        self._made_s: dict[str, float] = {}
        self.reads: dict[str, int] = {}

    # What refs ask for

    @property
    def objects(self) -> Refs:
        return self

    def drop_ref(self, entry: Entry) -> None:
        """Have the process of a ref know that it died."""
        runtime = self._runtimes.get(entry)
        if runtime is not None and not runtime.process.dead:
            runtime.objects.drop_ref(entry)
            runtime.io.wake_within(self._world.random.choice((0.0, TICK_S)))

    # What runtimes tell

    def created(self, runtime: Runtime, entry: Entry) -> None:
        """Note that a process has an entry of an object."""
        object_id = entry.object_id
        self._runtimes[entry] = runtime
        self._made_s.setdefault(object_id, self._world.loop.now_s)
        holders = self._holders.setdefault(object_id, [])
        if runtime.process not in holders:
            holders.append(runtime.process)

    def was_loaded(self, object_id: str, value: bytes) -> None:
        """Check a value."""
        if not is_value_of(object_id, value):
            self._fail(f"{object_id} has the value {value[:40]!r}")

    def was_read(self, runtime: Runtime, entry: Entry, value: Failed | bytes) -> None:
        """Check what a reader got: the value, or a reason for which there is none."""
        object_id = entry.object_id
        code = value.code if isinstance(value, Failed) else "value"
        self._world.record(runtime.process.name, "reads", f"{object_id} {code}")
        self.reads[code] = self.reads.get(code, 0) + 1
        if not isinstance(value, Failed):
            self.was_loaded(object_id, value)
        elif not self._may_fail(object_id, value):
            self._fail(f"{runtime.process.name} cannot read {object_id}: {value.message}")

    def _fail(self, text: str) -> None:
        self._world.fail(BrokenInvariantError(text))

    def _is_excused(self, object_id: str) -> bool:
        """Return whether who had refs to an object could not talk to others for a while, since it was made.

        Its owner keeps what is lent for a moment only, when a channel ends.
        """
        made_s = self._made_s.get(object_id, 0.0)
        return any(one.disturbed_s >= made_s for one in self._holders.get(object_id, ()))

    def _may_fail(self, object_id: str, failed: Failed) -> bool:
        plan, code = self._world.calls.get(task_of(object_id)), failed.code
        if code in ("object_freed", "owner_died"):
            subject = failed.message.split(maxsplit=1)[0]  # it, or what was needed to make it
            if self._is_excused(subject):
                return True
            # What a call needed may have been freed by the time at which it was executed again.
            return plan is not None and plan.has_arguments and plan.large and subject != object_id
        if plan is not None and (
            code == "job_finished" or (code in _UNAVAILABLE and "is finished" in failed.message)
        ):  # its job is over: its driver has ended or died, or was silent for too long
            job_id = plan.owner.job.job_id
            driver = self._world.drivers_by_job.get(job_id)
            return self._world.checks.has_succeeded(job_id) or (
                driver is not None and driver.process.disturbed_s > 0.0
            )
        if plan is None or plan.certain:
            return code in _UNAVAILABLE and plan is None  # nobody can make again what was put
        if code == "task_cancelled":
            return plan.cancelled
        if code == "task_failed":
            return plan.fails or plan.has_arguments
        return code in _UNAVAILABLE or code in _DIED

    # As time passes

    def check(self) -> None:
        """Check that objects live while others have refs to them."""
        peers = self._world.peers_by_id
        for runtime in self._world.runtimes:
            if runtime.process.dead:
                continue
            for entry in runtime.table.entries.values():
                if entry.owner is None or isinstance(entry.location, Failed):
                    continue
                owner = peers.get(entry.owner.peer_id)
                if (
                    owner is not None
                    and not owner.process.dead
                    and entry.object_id not in owner.table.entries
                    and entry.refs > 0
                    and not self._is_excused(entry.object_id)
                ):
                    self._fail(
                        f"{runtime.process.name} has a ref to {entry.object_id}, which its owner "
                        f"{owner.process.name} has freed"
                    )

    def left(self) -> list[str]:
        """Return what living processes still have."""
        left: list[str] = []
        for runtime in self._world.runtimes:
            if not runtime.process.dead:
                left += [
                    f"{runtime.process.name} has {name} {some}"
                    for name, some in runtime.left().items()
                ]
        return left
