"""Recovery of objects whose bytes cannot be read where they were.

A reader tells the owner. The owner asks the home, if that lives; then the other nodes, one of which may
have a copy, and becomes the object's home; at last it has the task that made it executed again. A node that
is silent, and not dead, may have a copy too: it is waited for. All who read the object meanwhile wait for the
same recovery. What cannot be recovered fails for good, with why.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from msgspec import structs

from stoker.exceptions import (
    ObjectFreedError,
    ObjectLostError,
    ObjectNodeDiedError,
    OwnerDiedError,
    StokerError,
)
from stoker.runtime.serialization.exceptions import encode_error
from stoker_wire.errors import UnavailableError
from stoker_wire.messages.cluster import Node, NodeState
from stoker_wire.messages.control import Page
from stoker_wire.messages.data import Recover, Resolved, Stored
from stoker_wire.messages.objects import AdoptedObjects, AdoptObjects, is_detached

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from stoker.runtime.net.channels import Channels
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.objects.table import Entry, ObjectTable
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.data.channel import Channel
    from stoker_wire.messages.common import Address
    from stoker_wire.messages.data import Failed, Location

_GATHER_S = 0.005
"""How long the losses of a node are gathered, to ask about many objects at once."""
_ASK_NODE_S = 5.0
_ASK_OWNER_S = 3600.0
"""How long an owner may take, whose task may wait for room. Readers have deadlines of their own."""
_SILENT_S = 30.0
"""How long a silent node is waited for, until it answers or is declared dead."""
_AGAIN_S = 0.3
_ADOPT_AT_ONCE = 10_000


class Maker(Protocol):
    """The part that knows how objects of this process were made."""

    async def make_again(self, entry: Entry, why: str) -> Location:
        """Have the task of a lost object executed again; return the new location.

        Raises ObjectLostError, which says why, if that is not possible.
        """


class _Found(NamedTuple):
    """The place of an object if any node has it; else how its home died, if it did, and who is silent."""

    place: Stored | None = None
    death: str = ""
    silent: tuple[str, ...] = ()
    """The nodes that are not dead, and may have a copy, but do not answer."""


_Wanted = dict[str, "asyncio.Future[_Found]"]


class Recovery:
    """The recoveries under way in this process (loop thread)."""

    def __init__(
        self,
        address: Address,
        io: IoThread,
        channels: Channels,
        clients: ClusterClients,
        table: ObjectTable,
        relocate: Callable[[Entry, Location], None],
        free: Callable[[Location], None],
        locate: Callable[[str, str], Awaitable[Location]],
    ) -> None:
        self.maker: Maker | None = None
        self._address = address
        self._io = io
        self._channels = channels
        self._clients = clients
        self._table = table
        self._relocate = relocate
        self._free = free
        self._locate = locate
        self._underway: dict[str, asyncio.Task[str]] = {}
        self._asked: dict[str, tuple[Channel, asyncio.Future[Location]]] = {}
        """Borrowed objects whose owners recover them."""
        self._wanted: dict[str, _Wanted] = {}
        """Home -> the objects to look for, all in one request to each node."""
        self._asking: dict[str, int] = {}
        """Node id -> the searches that wait for its answer."""
        self._dead: dict[str, str] = {}
        """Node id -> how it died, of nodes that had objects of this process."""

    def is_lost(self, entry: Entry) -> bool:
        """Return whether a settled object is known to be lost, and not recovered yet."""
        location = entry.location
        return entry.object_id in self._underway or (
            isinstance(location, Stored) and location.node_id in self._dead
        )

    def is_dead(self, node_id: str) -> bool:
        """Return whether a node that had objects of this process is known to be dead."""
        return node_id in self._dead

    def silent(self) -> str:
        """Return a line that names the nodes whose answer is waited for, or '' (any thread)."""
        return _silence(tuple(self._asking))

    def begin(self, entry: Entry, lost: Stored, done: Callable[[str], None]) -> None:
        """Recover an object that could not be read at ``lost``; then call ``done``.

        It is told why that could not be decided, or ''.
        """
        task = self._start(entry, lost)
        if task is None:
            done("")
        else:
            task.add_done_callback(lambda task: done(_undecided(task)))

    async def recover(self, entry: Entry, lost: Stored) -> None:
        """Recover an object that could not be read at ``lost``; return when it has its new location."""
        task = self._start(entry, lost)
        if task is not None:
            await asyncio.shield(task)

    def _start(self, entry: Entry, lost: Stored) -> asyncio.Task[str] | None:
        """Return the recovery of an object, or None if it is not where it was lost any more."""
        object_id = entry.object_id
        task = self._underway.get(object_id)
        if task is None:
            if entry.location != lost:
                return None
            task = self._io.background.spawn(self._recover(entry, lost), name="recovery")
            self._underway[object_id] = task
            task.add_done_callback(lambda _: self._underway.pop(object_id, None))
        return task

    async def _recover(self, entry: Entry, lost: Stored) -> str:
        location: Location
        try:
            if is_detached(lost.object_id):
                location = await self._locate_detached(entry, lost)
            elif entry.owner is not None:
                location = await self._ask_owner(entry, entry.owner, lost)
            else:
                location = await self._find_or_make(entry, lost)
        except ObjectLostError as error:
            location = encode_error(error)
        except StokerError as error:  # the cluster cannot be asked: the reader may try again
            return error.message
        if location != lost and entry.location == lost:  # else it has come by other means
            self._relocate(entry, location)
        return ""

    async def _locate_detached(self, entry: Entry, lost: Stored) -> Location:
        """Ask the gcs where a detached object is; a task whose result it was can make it again."""
        try:
            return await self._locate(lost.object_id, lost.node_id)
        except ObjectLostError as error:
            if is_detached(entry.object_id) or entry.owner is not None:
                raise
            assert self.maker is not None
            return await self.maker.make_again(entry, str(error))

    # -- the borrower ----------------------------------------------------------------------------

    async def _ask_owner(self, entry: Entry, owner: Address, lost: Stored) -> Location:
        object_id = entry.object_id
        try:
            channel = await self._channels.channel(owner)
        except StokerError as error:
            raise self._owner_died(object_id, owner, lost, str(error)) from None
        answer: asyncio.Future[Location] = self._io.loop.create_future()
        self._asked[object_id] = channel, answer
        channel.post(Recover(object_id, lost.node_id))
        try:
            async with asyncio.timeout(_ASK_OWNER_S):
                return await answer
        except ConnectionError as error:
            raise self._owner_died(object_id, owner, lost, str(error)) from None
        except TimeoutError:
            return lost
        finally:
            del self._asked[object_id]

    def _owner_died(self, object_id: str, owner: Address, lost: Stored, why: str) -> OwnerDiedError:
        return OwnerDiedError(
            f"{object_id} cannot be had on node {lost.node_id}, and its owner {owner.peer_id} does "
            f"not answer\n{why}\nonly the owner of an object can have it made again"
        )

    def on_resolved(self, message: Resolved) -> bool:
        """Take an owner's answer; return whether one was awaited."""
        _, answer = self._asked.get(message.object_id, (None, None))
        if answer is None:
            return False
        if not answer.done():
            answer.set_result(message.location)
        return True

    def on_channel_closed(self, channel: Channel) -> None:
        """Fail what was asked on a channel that is closed."""
        for asked_on, answer in self._asked.values():
            if asked_on is channel and not answer.done():
                answer.set_exception(ConnectionError("its connection closed"))

    # -- the owner -------------------------------------------------------------------------------

    def on_recover(self, channel: Channel, message: Recover) -> None:
        """Recover an object that another process could not read, and tell it the new location."""
        entry = self._table.get(message.object_id)
        if entry is None:  # the borrower's channel was broken for long, and it was freed meanwhile
            channel.post(Resolved(message.object_id, freed(message.object_id, self._address)))
            return
        location = entry.location
        if location is None:  # it is being made
            if channel not in entry.subscribers:
                entry.subscribers.append(channel)
            return

        def answer(_: str = "") -> None:
            if entry.location is not None:
                channel.post(Resolved(entry.object_id, entry.location))

        if isinstance(location, Stored) and location.node_id == message.node_id:
            self.begin(entry, location, answer)
        else:
            answer()

    async def _find_or_make(self, entry: Entry, lost: Stored) -> Location:
        found = await self._find(entry.object_id, lost.node_id)
        if found.place is not None:
            return structs.replace(found.place, refs=lost.refs)
        if found.death:
            why = f"{entry.object_id} is lost with its node\n{found.death}"
        else:
            why = f"{entry.object_id} is no longer on node {lost.node_id}"
        assert self.maker is not None
        try:
            return await self.maker.make_again(entry, why)
        except ObjectLostError as error:
            if found.silent:
                raise UnavailableError(f"{why}\n{_silence(found.silent)}\n{error}") from None
            kind = ObjectNodeDiedError if found.death else ObjectLostError
            owner = f"its owner is {self._address.peer_id}, no other node has a copy"
            raise kind(f"{why}\n{owner}\n{error}") from None

    async def _find(self, object_id: str, home: str) -> _Found:
        """Look for an object at home and elsewhere, together with others that were lost there."""
        wanted = self._wanted.get(home)
        if wanted is None:
            wanted = self._wanted[home] = {}
            self._io.background.spawn(self._search(home), name="search")
        future = wanted[object_id] = self._io.loop.create_future()
        return cast("_Found", await future)

    async def _search(self, home: str) -> None:
        await asyncio.sleep(_GATHER_S)
        wanted = self._wanted.pop(home)
        try:
            death, others = await self._ask_home(home, wanted)
        except StokerError as error:
            for future in wanted.values():
                if not future.done():
                    future.set_exception(error)
            return
        rest = {object_id: future for object_id, future in wanted.items() if not future.done()}
        if not rest:
            return
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask_other(node, rest)) for node in others]
        silent = tuple(
            node.node_id for node, one in zip(others, asked, strict=True) if not one.result()
        )
        for future in rest.values():
            if not future.done():
                future.set_result(_Found(None, death, silent))

    async def _ask_home(self, home: str, wanted: _Wanted) -> tuple[str, list[Node]]:
        """Ask a home what it still has; return how it died, if it did, and all others that are not dead.

        Raises UnavailableError if it neither answers nor is declared dead.
        """
        deadline_s = self._io.loop.time() + _SILENT_S
        while True:
            nodes = await self._nodes()
            node = nodes.pop(home, None)
            others = [one for one in nodes.values() if one.state is not NodeState.DEAD]
            if node is None or node.state is NodeState.DEAD:
                death = node.death if node is not None else f"node {home} is not of this cluster"
                self._dead[home] = death
                self._recover_all(home)
                return death, others
            if await self._adopt(node, wanted):
                return "", others
            if self._io.loop.time() > deadline_s:
                raise UnavailableError(f"node {home} at {node.url} does not answer")
            await asyncio.sleep(_AGAIN_S)

    async def _ask_other(self, node: Node, wanted: _Wanted) -> bool:
        """Ask a node what it has until it answers or is declared dead; return False if neither comes.

        It is asked on when others have all: it may have taken an earlier question, and is told to free.
        """
        node_id, deadline_s = node.node_id, self._io.loop.time() + _SILENT_S
        self._asking[node_id] = self._asking.get(node_id, 0) + 1
        try:
            while node.state is not NodeState.DEAD and not await self._adopt(node, wanted):
                if self._io.loop.time() > deadline_s:
                    return False
                await asyncio.sleep(_AGAIN_S)
                with contextlib.suppress(StokerError):
                    node = await self._clients.node_of(node_id)
            return True
        finally:
            self._asking[node_id] -= 1
            if not self._asking[node_id]:
                del self._asking[node_id]

    def _recover_all(self, home: str) -> None:
        """Begin to recover all objects of this process that were lost with a node, not only what is read."""
        for entry in list(self._table.entries.values()):
            location = entry.location
            if type(location) is Stored and location.node_id == home and entry.owner is None:
                self._start(entry, location)

    async def _nodes(self) -> dict[str, Node]:
        nodes = await self._clients.gcs.items("/v1/nodes", Page[Node])
        return {node.node_id: node for node in nodes}

    async def _adopt(self, node: Node, wanted: _Wanted) -> bool:
        """Have a node become the home of what it has, unless another has; return whether it answered."""
        ids = tuple(wanted)
        for first in range(0, len(ids), _ADOPT_AT_ONCE):
            request = AdoptObjects(object_ids=ids[first : first + _ADOPT_AT_ONCE])
            try:
                adopted = await self._clients.client_of(node.url).call(
                    "POST",
                    "/v1/objects/adopt",
                    request,
                    reply=AdoptedObjects,
                    timeout_s=_ASK_NODE_S,
                    retry=False,
                )
            except StokerError:
                return False
            for info in adopted.objects:
                here = Stored(info.nbytes, node.node_id, node.url, (), info.object_id)
                future = wanted[info.object_id]
                if not future.done():
                    future.set_result(_Found(here))
                elif not _is_at(future, here):
                    self._free(here)
        return True


def _undecided(task: asyncio.Task[str]) -> str:
    return "" if task.cancelled() or task.exception() else task.result()


def _is_at(future: asyncio.Future[_Found], place: Stored) -> bool:
    """Return whether an object was found at this node before, or nobody waits for it any more."""
    found = None if future.cancelled() else future.result().place
    return found is None or found.node_id == place.node_id


def _silence(nodes: tuple[str, ...]) -> str:
    """Return the clause about nodes that do not answer."""
    return f"{', '.join(sorted(nodes))} may have a copy, and did not answer yet" if nodes else ""


def freed(object_id: str, owner: Address) -> Failed:
    """Return an owner's answer to a borrower that asks for what it has no more."""
    return encode_error(
        ObjectFreedError(
            f"{object_id} was freed by its owner {owner.peer_id}\nno ref to it was left there"
        )
    )
