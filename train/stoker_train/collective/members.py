"""The members of a group: which process is which rank, so that an error can name it.

Each says who it is over the group's store when the group forms.
"""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import msgspec

from stoker.runtime import current
from stoker_wire.messages.work import Actor, ActorState

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One member: its actor, if it is one, and which of its starts; node and process."""

    rank: int
    actor_id: str = ""
    class_name: str = ""
    incarnation: int = 0
    node_id: str = ""
    peer_id: str = ""
    pid: int = 0

    @property
    def title(self) -> str:
        """The member as messages name it."""
        who = f"{self.class_name} {self.actor_id}" if self.actor_id else self.peer_id
        return f"{who}, pid {self.pid}"

    def is_ended_by(self, actor: Actor) -> bool:
        """Return whether a record of its actor says that this process is over."""
        if not self.actor_id or actor.actor_id != self.actor_id:
            return False
        if actor.state is ActorState.DEAD:
            return actor.incarnation >= self.incarnation
        return actor.incarnation > self.incarnation  # a restart counts on


def own_member(rank: int) -> Member:
    """Return this process as a member."""
    runtime = current.runtime()
    lease, actor = runtime.job.lease, runtime.job.actor
    return Member(
        rank=rank,
        actor_id=lease.actor_id if lease is not None else "",
        class_name=actor.class_name if actor is not None else "",
        incarnation=actor.incarnation if actor is not None else 0,
        node_id=runtime.identity.node.node_id if runtime.identity.node else "",
        peer_id=runtime.identity.peer_id,
        pid=os.getpid(),
    )


def exchange_members(store: Store, rank: int, size: int) -> tuple[str, dict[int, Member]]:
    """Return an id that no other group has, and all members by rank; each member has to call it."""
    if rank == 0:
        store.set("group", uuid.uuid4().hex[:12])
    store.set(f"member/{rank}", msgspec.json.encode(own_member(rank)).decode())
    members = {
        other: msgspec.json.decode(store.get(f"member/{other}"), type=Member)
        for other in range(size)
    }
    return store.get("group").decode(), members
