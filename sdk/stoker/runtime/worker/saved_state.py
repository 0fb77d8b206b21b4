"""The state that an actor saves, so that its next incarnation goes on with it.

What ``__stoker_save__`` returns becomes a detached object; only then the actor's record in the gcs names it,
so a save that failed half-way replaces nothing, and a worker of the past, which the gcs fences, replaces
nothing either. The gcs frees the object when the actor is dead for good.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from stoker.exceptions import StokerError
from stoker.runtime.objects.detached import Durability
from stoker_wire.messages.objects import ACTOR_NAMESPACE, new_detached_id
from stoker_wire.messages.work import Actor, ActorState, ReportActor

if TYPE_CHECKING:
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.cluster import ActorSpec

_CALL_S = 30.0
_READ_S = 900.0
_COPIES = 2
_log = logging.getLogger(__name__)


class SavedState:
    """The saved state of this worker's actor: read once when it starts, and replaced while it lives."""

    def __init__(
        self,
        spec: ActorSpec,
        interval_s: float | None,
        io: IoThread,
        gcs: Client,
        objects: ObjectStore,
    ) -> None:
        self.interval_s = interval_s
        self._spec = spec
        self._io = io
        self._gcs = gcs
        self._objects = objects
        self._object_id = ""
        self._sequence = 0
        self._saved_at_s = time.monotonic()
        self._causes: set[str] = set()
        self.lock = threading.Lock()
        """Held while a state is taken and stored: a later one is never replaced by an earlier."""

    @property
    def is_due(self) -> bool:
        """Whether the state is to be saved now that a call has ended."""
        if self.interval_s is None:
            return False
        return time.monotonic() - self._saved_at_s >= self.interval_s

    def load(self) -> tuple[Any, ...]:
        """Return the state that an earlier incarnation saved, in a tuple that is empty if none did."""
        if not self._spec.incarnation:
            return ()
        path = f"/v1/actors/{self._spec.actor_id}"
        actor = self._io.run(self._gcs.call("GET", path, reply=Actor, timeout_s=_CALL_S), _READ_S)
        self._object_id = actor.state_object
        if not self._object_id:
            return ()
        return (
            self._objects.get([self._objects.detached.import_ref(self._object_id)], _READ_S)[0],
        )

    def store(self, state: Any) -> None:
        """Store a state in place of the one before. Raises StokerError, and keeps that one."""
        detached, spec = self._objects.detached, self._spec
        object_id = new_detached_id()
        self._sequence += 1
        detached.store(
            object_id,
            detached.packed(state),
            state,
            name=f"{spec.actor_id}:{spec.incarnation}:{self._sequence}",
            namespace=ACTOR_NAMESPACE,
            durability=Durability(copies=_COPIES, wait=False),
        )
        report = ReportActor(
            state=ActorState.ALIVE, incarnation=spec.incarnation, state_object=object_id
        )
        try:
            call = self._gcs.call(
                "POST", f"/v1/actors/{spec.actor_id}/report", report, timeout_s=_CALL_S
            )
            self._io.run(call, _CALL_S + 1)
        except StokerError as error:
            if error.code == "fenced":  # else the gcs may have it
                detached.free(object_id)
            raise
        before, self._object_id = self._object_id, object_id
        self._saved_at_s = time.monotonic()
        if before:
            with contextlib.suppress(StokerError):  # the gcs frees it later
                detached.free(before)

    def failed(self, error: BaseException) -> None:
        """Log why a save failed, once per cause; the actor goes on."""
        self._saved_at_s = time.monotonic()
        cause = f"{type(error).__name__}: {error}"
        if cause not in self._causes:
            self._causes.add(cause)
            name = f"{self._spec.class_name} ({self._spec.actor_id})"
            _log.warning("__stoker_save__ of actor %s failed: %s", name, cause, exc_info=error)
