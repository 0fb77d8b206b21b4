"""Reads of values in another machine's memory: they are brought here first.

A process with a nodelet has that pull the object into the node's arena, once for all processes of
the node, and reads it there without a copy. A driver on a machine without one, or a process whose arena
has no room, fetches into memory of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stoker.exceptions import GetTimeoutError, ObjectLostError, ObjectNodeDiedError, StokerError
from stoker_wire.arena import split
from stoker_wire.data.range_reader import CHUNK_NBYTES, RangeReader
from stoker_wire.errors import (
    ArenaFullError,
    DeadlineExceededError,
    NotFoundError,
    UnavailableError,
)
from stoker_wire.messages.cluster import NodeState
from stoker_wire.messages.objects import ObjectInfo, PullObject

if TYPE_CHECKING:
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.arena import Arena
    from stoker_wire.messages.data import Stored

_PULL_WAIT_S = 60.0
"""How long one request to the own nodelet waits; it gives up by itself when a pull makes no progress."""
_GRACE_S = 5.0
_PULL_TRIES = 3
"""How often to pull: a copy may be evicted between its pull and its first read."""
_SEAL_S = 2.0
_PATIENCE_S = 60.0
_RETRY_S = 0.1
_NODE_S = 10.0


class RemoteReader:
    """The reader of objects on other machines. For user threads, which wait."""

    def __init__(
        self, identity: Identity, io: IoThread, clients: ClusterClients, arena: Arena | None
    ) -> None:
        self._identity = identity
        self._io = io
        self._clients = clients
        self._arena = arena

    def fetch(
        self, location: Stored, object_id: str, timeout_s: float | None
    ) -> tuple[Any, list[Any]]:
        """Return the pickle and buffers of an object, as read-only views.

        Raises ObjectLostError if it cannot be had, GetTimeoutError if ``timeout_s`` passed.
        """
        deadline = _Deadline(location, object_id, timeout_s)
        arena = self._arena
        if arena is None:
            return split(self._into_own_memory(location, object_id, deadline))
        try:
            for _ in range(_PULL_TRIES):
                with contextlib.suppress(ObjectLostError):
                    return arena.read(object_id)
                self._pull(location, object_id, deadline)
            with contextlib.suppress(ObjectLostError):
                return arena.read(object_id)
        except ArenaFullError:
            pass
        except _NodeletDiedError:
            self._arena = None  # it went with its nodelet
        # The arena is full, or evicts copies as fast as they come.
        return split(self._into_own_memory(location, object_id, deadline))

    def _pull(self, location: Stored, object_id: str, deadline: _Deadline) -> None:
        node = self._identity.node
        assert node is not None
        client = self._clients.client_of(node.url)
        request = PullObject(
            node_id=location.node_id, url=location.node_url, nbytes=location.nbytes
        )
        while True:
            wait_s = deadline.left_s(_PULL_WAIT_S)
            try:
                pull = client.call(
                    "POST",
                    f"/v1/objects/{object_id}/pull",
                    request,
                    reply=ObjectInfo,
                    timeout_s=wait_s,
                    retry=False,
                )
                self._io.run(pull, wait_s if deadline.at_s is not None else wait_s + _GRACE_S)
            except DeadlineExceededError:
                if wait_s < _PULL_WAIT_S:
                    raise deadline.passed() from None
            except UnavailableError:
                if self._death_of(node.node_id):
                    raise _NodeletDiedError from None
                if not deadline.left_s(_PULL_WAIT_S):
                    raise deadline.passed() from None
                time.sleep(_RETRY_S)
            else:
                return

    def _into_own_memory(self, location: Stored, object_id: str, deadline: _Deadline) -> memoryview:
        memory = memoryview(mmap.mmap(-1, location.nbytes))
        identity = self._identity
        reader = RangeReader(
            location.node_url,
            token=identity.credential,
            peer=identity.peer_id,
            tls=self._clients.tls,
            gateway=self._clients.gateway,
        )
        alarm = None
        if deadline.at_s is not None:
            alarm = threading.Timer(max(0.0, deadline.at_s - time.monotonic()), reader.abort)
            alarm.daemon = True
            alarm.start()
        try:
            self._fill(memory, reader, location, object_id, deadline)
        finally:
            if alarm is not None:
                alarm.cancel()
            reader.close()
        return memory.toreadonly()

    def _fill(
        self,
        memory: memoryview,
        reader: RangeReader,
        location: Stored,
        object_id: str,
        deadline: _Deadline,
    ) -> None:
        begin, moved_s = 0, time.monotonic()
        while begin < memory.nbytes:
            chunk = memory[begin : begin + CHUNK_NBYTES]
            try:
                reader.read(object_id, begin, chunk)
            except StokerError as error:
                if deadline.at_s is not None and time.monotonic() >= deadline.at_s:
                    raise deadline.passed() from None
                silent_s = time.monotonic() - moved_s
                if isinstance(error, NotFoundError):
                    # The report that it was written may still be on its way to the nodelet.
                    may_appear = begin == 0 and silent_s < _SEAL_S
                else:
                    may_appear = error.retryable and silent_s < _PATIENCE_S
                    if may_appear:
                        self.check_alive(location.node_id, object_id)
                if not may_appear:
                    raise ObjectLostError(
                        f"{object_id} of node {location.node_id} cannot be had\n"
                        f"{begin} of {location.nbytes} bytes have come, then: {error}"
                    ) from None
                time.sleep(_RETRY_S)
            else:
                begin, moved_s = begin + chunk.nbytes, time.monotonic()

    def heir_of(self, location: Stored) -> Stored | None:
        """Return where an object is if its home was drained; None if it was not (user threads)."""
        if self._io.is_current():
            return None
        try:
            _, heir = self._io.run(self._clients.node_and_heir(location.node_id), _NODE_S)
        except StokerError:
            return None
        if heir is None:
            return None
        return replace(location, node_id=heir.node_id, node_url=heir.url)

    def check_alive(self, node_id: str, object_id: str) -> None:
        """Raise ObjectNodeDiedError if the node of an object is dead, as far as the gcs knows."""
        if not self._io.is_current() and (death := self._death_of(node_id)):
            raise ObjectNodeDiedError(f"{object_id} is lost with its node\n{death}") from None

    def _death_of(self, node_id: str) -> str:
        """Return how a node died, if the gcs knows that it did."""
        try:
            node = self._io.run(self._clients.node_of(node_id), _NODE_S)
        except NotFoundError:
            return f"node {node_id} is not of this cluster"
        except StokerError:
            return ""
        return node.death if node.state is NodeState.DEAD else ""


class _NodeletDiedError(Exception):
    """The nodelet of this process's own node is dead."""


class _Deadline:
    """The moment when the caller's time is over, and the error for that."""

    def __init__(self, location: Stored, object_id: str, timeout_s: float | None) -> None:
        self._location, self._object_id, self._timeout_s = location, object_id, timeout_s
        self.at_s = None if timeout_s is None else time.monotonic() + max(0.0, timeout_s)

    def left_s(self, most_s: float) -> float:
        """Return the seconds that are left, at most ``most_s``."""
        if self.at_s is None:
            return most_s
        return min(most_s, max(0.0, self.at_s - time.monotonic()))

    def passed(self) -> GetTimeoutError:
        """Return the error for when the time is over."""
        location = self._location
        return GetTimeoutError(
            f"{self._object_id} did not come within the {self._timeout_s:.3g} s that were left\n"
            f"its {location.nbytes} bytes are on node {location.node_id} ({location.node_url})"
        )
