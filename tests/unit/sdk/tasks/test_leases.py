"""The leases of an owner: what it says to the scheduler about those that it has, and no longer has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stoker.runtime.tasks import leases as module
from stoker.runtime.tasks.dispatch import ClassQueue
from stoker.runtime.tasks.leases import Leases
from stoker_wire.data.channel import Channel
from stoker_wire.errors import ConflictError, UnavailableError
from stoker_wire.messages.cluster import (
    Demand,
    GrantedLease,
    Lease,
    LeaseKind,
    LeaseReply,
    LeaseUpdates,
    OwnerPoll,
)
from stoker_wire.messages.common import Address
from stoker_wire.messages.data import Inline
from stoker_wire.process.background import Background

KEY = b"class"


class _Task:
    """A call, as a queue sees it."""

    task_id = "t_1"
    fairness_key = ""
    exclusive = False
    expected_s = None
    args = Inline(b"")
    deps = ()


class _Owner:
    """What leases need of their process: a loop, channels, a scheduler, and the tasks that they are for."""

    running = True
    epoch = 1

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.background = Background("owner")
        self.queue: ClassQueue[Any] = ClassQueue()
        self.queues = {KEY: self.queue}
        self.calls: list[tuple[str, Any]] = []

    async def channel(self, _: Address) -> Any:
        return object()

    def dispatch(self, _: bytes) -> None:
        self.queue.ready.popleft()

    async def scheduler_call(self, path: str, body: Any, *_: Any, **__: Any) -> Any:
        await asyncio.sleep(0.001)
        self.calls.append((path, body))
        if path == "/v1/leases":
            lease = Lease(
                lease_id="l_1",
                owner_id="p_1",
                job_id="job_1",
                kind=LeaseKind.TASK,
                node_id="n_1",
                node_incarnation=1,
                resources={"CPU": 1.0},
            )
            granted = GrantedLease(lease=lease, worker_id="w_1", address=_address("w_1"))
            return LeaseReply(granted=(granted,))
        return LeaseUpdates(epoch=self.epoch)

    async def until(self, path: str, after: int = 0) -> int:
        """Wait for a call, and return how many there were up to it."""
        async with asyncio.timeout(10.0):
            while True:
                for index, (asked, _) in enumerate(self.calls[after:]):
                    if asked == path:
                        return after + index + 1
                await asyncio.sleep(0.001)


def _address(peer_id: str) -> Address:
    return Address(peer_id, "n_1", "h", "", "")


async def test_an_owner_goes_on_to_list_its_leases_when_it_has_none_left() -> None:
    owner: Any = _Owner()
    leases = Leases(_address("p_1"), owner, owner, owner, owner, idle_s=0.1)
    leases.add_class(KEY, Demand(job_id="job_1", resources={"CPU": 1.0}))
    owner.queue.ready.append(_Task())
    leases.request(KEY)
    polled = await owner.until("/v1/owners/p_1/poll")
    assert owner.calls[polled - 1][1].lease_ids == ("l_1",)

    leases.tick(KEY, owner.queue, owner.loop.time() + 1.0)
    released = await owner.until("/v1/leases/release")
    # The leader that took the release may be lost with it: the next one has to hear that it is gone.
    for _ in range(3):
        released = await owner.until("/v1/owners/p_1/poll", after=released)
    body = owner.calls[released - 1][1]
    assert isinstance(body, OwnerPoll)
    assert body.lease_ids == ()
    await owner.background.close()


async def test_an_owner_whose_request_got_no_answer_says_that_it_has_nothing() -> None:
    class Unanswered(_Owner):
        async def scheduler_call(self, path: str, body: Any, *rest: Any, **more: Any) -> Any:
            if path == "/v1/leases":
                raise UnavailableError("the connection broke")
            return await super().scheduler_call(path, body, *rest, **more)

    owner: Any = Unanswered()
    leases = Leases(_address("p_1"), owner, owner, owner, owner, idle_s=0.1)
    leases.add_class(KEY, Demand(job_id="job_1", resources={"CPU": 1.0}))
    owner.queue.ready.append(_Task())
    leases.request(KEY)
    polled = await owner.until("/v1/owners/p_1/poll")
    assert owner.calls[polled - 1][1].lease_ids == ()
    await owner.background.close()


@pytest.mark.parametrize("peer_id", ["w_1", "p_1"])
async def test_a_worker_of_a_node_that_is_taken_for_lost_fails_no_task(peer_id: str) -> None:
    class OfALostNode(_Owner):
        def __init__(self) -> None:
            super().__init__()
            self.failed: list[bytes] = []

        def fail_class(self, key: bytes, _: Exception) -> None:
            self.failed.append(key)
            self.queue.ready.clear()

        async def scheduler_call(self, path: str, body: Any, *rest: Any, **more: Any) -> Any:
            if path == "/v1/leases" and not any(asked == path for asked, _ in self.calls):
                self.calls.append((path, body))
                raise ConflictError("its owner was on node n_1, which is lost")
            return await super().scheduler_call(path, body, *rest, **more)

    owner: Any = OfALostNode()
    leases = Leases(_address(peer_id), owner, owner, owner, owner, idle_s=0.1)
    leases.add_class(KEY, Demand(job_id="job_1", resources={"CPU": 1.0}))
    owner.queue.ready.append(_Task())
    leases.request(KEY)
    asked = await owner.until("/v1/leases")
    if peer_id == "w_1":  # it ends with its node, and if the node lives after all it gets its lease
        await owner.until("/v1/leases", after=asked)
        assert owner.failed == []
    else:
        async with asyncio.timeout(10.0):
            while not owner.failed:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    await owner.background.close()


async def test_an_owner_without_leases_lists_on_while_leaders_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Leaderless(_Owner):
        lost = 0

        async def scheduler_call(self, path: str, body: Any, *rest: Any, **more: Any) -> Any:
            if path.endswith("/poll") and self.lost:
                self.lost -= 1
                raise UnavailableError("the leader is gone")
            return await super().scheduler_call(path, body, *rest, **more)

    monkeypatch.setattr(module, "_LIST_ON_S", 0.8)
    owner: Any = Leaderless()
    leases = Leases(_address("p_1"), owner, owner, owner, owner, idle_s=0.1)
    owner.lost = 2  # each costs half a second: more than it would list on
    leases._list_on()
    polled = await owner.until("/v1/owners/p_1/poll")
    for _ in range(2):  # the next leader has to hear twice that there is nothing
        polled = await owner.until("/v1/owners/p_1/poll", after=polled)
    async with asyncio.timeout(10.0):
        while leases._polling:  # noqa: ASYNC110  the end of it is no event
            await asyncio.sleep(0.01)
    await owner.background.close()


async def test_an_owner_without_leases_lists_on_when_another_leader_answers() -> None:
    owner: Any = _Owner()
    leases = Leases(_address("p_1"), owner, owner, owner, owner, idle_s=0.1)
    leases._list_on()
    polled = await owner.until("/v1/owners/p_1/poll")
    polled = await owner.until("/v1/owners/p_1/poll", after=polled)
    began_s = leases._lost_at_s
    owner.epoch = (
        2  # the one before has answered without knowing of its end, and took releases with it
    )
    for _ in range(2):
        polled = await owner.until("/v1/owners/p_1/poll", after=polled)
    lists_on_from_s = leases._lost_at_s
    assert lists_on_from_s > began_s
    for _ in range(2):  # once for each
        polled = await owner.until("/v1/owners/p_1/poll", after=polled)
    assert leases._lost_at_s == lists_on_from_s
    await owner.background.close()


async def test_a_lease_whose_worker_is_to_be_killed_is_not_returned_first() -> None:
    class Killing(_Owner):
        """Kills take longer than a release, as on a connection that is still to be made."""

        async def channel(self, _: Address) -> Any:
            channel = Channel.__new__(Channel)
            channel.closed = True
            return channel

        async def kill_worker(self, *_: str) -> bool:
            await asyncio.sleep(0.1)
            self.calls.append(("kill", None))
            return True

        async def on_worker_lost(self, key: bytes, lease_id: str, cause: Exception) -> None:
            self.queues[key].drop_slot(lease_id)

    owner: Any = Killing()
    leases = Leases(_address("p_1"), owner, owner, owner, owner, idle_s=0.1)
    leases.add_class(KEY, Demand(job_id="job_1", resources={"CPU": 1.0}))
    owner.queue.ready.append(_Task())
    leases.request(KEY)
    await owner.until("/v1/owners/p_1/poll")
    slot = owner.queue.slots["l_1"]
    leases.kill(slot, "it was cancelled")
    leases.return_if_closing(slot)  # its only call has failed with that
    leases.tick(KEY, owner.queue, owner.loop.time() + 1.0)
    released = await owner.until("/v1/leases/release")
    assert [path for path, _ in owner.calls if path != "/v1/owners/p_1/poll"] == [
        "/v1/leases", "kill", "/v1/leases/release",
    ]  # fmt: skip
    assert owner.calls[released - 1][1].kill
    await owner.background.close()
