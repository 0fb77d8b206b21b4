"""The state that an actor saves, so that its next incarnation goes on with it.

What ``__stoker_save__`` returns becomes a detached object; only then the actor's record in the gcs names it,
so a save that failed half-way replaces nothing, and a worker of the past, which the gcs fences, replaces
nothing either. The gcs frees the object when the actor is dead for good.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from stoker.exceptions import ArenaFullError, NodeDiedError, StokerError
from stoker.runtime.objects.detached import Durability
from stoker_wire.errors import DeadlineExceededError, UnavailableError
from stoker_wire.messages.objects import ACTOR_NAMESPACE, new_detached_id
from stoker_wire.messages.work import Actor, ActorState, ReportActor

if TYPE_CHECKING:
    from stoker.runtime.objects.store import ObjectStore
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.http.client.client import Client
    from stoker_wire.messages.cluster import ActorSpec

_CALL_S = 30.0
_READ_S = 900.0
_AGAIN_S = 1.0
_COPIES = 2
_log = logging.getLogger(__name__)


class SavedState:
    """The saved state of this worker's actor: read once when it starts, and replaced while it lives."""

    def __init__(
        self,
        spec: ActorSpec,
        io: IoThread,
        gcs: Client,
        objects: ObjectStore,
    ) -> None:
        self._spec = spec
        self._io = io
        self._gcs = gcs
        self._objects = objects
        self._object_id = ""
        self._sequence = 0
        self._causes: set[tuple[str, str]] = set()

    def load(self) -> tuple[Any, ...]:
        """Return the state that an earlier incarnation saved, in a tuple that is empty if none did.

        What passes is waited for. Raises UnavailableError if it lasts, ObjectLostError if no node that
        lives has the state.
        """
        if not self._spec.incarnation:
            return ()
        until_s = time.monotonic() + _READ_S
        while True:
            try:
                return self._load()
            except StokerError as error:
                if not (error.retryable or isinstance(error, (NodeDiedError, ArenaFullError))):
                    raise
                if time.monotonic() > until_s:
                    raise UnavailableError(
                        f"the state that it saved could not be read for {_READ_S:g} s\n{error}"
                    ) from error
                time.sleep(_AGAIN_S)

    def _load(self) -> tuple[Any, ...]:
        path = f"/v1/actors/{self._spec.actor_id}"
        actor = self._io.run(self._gcs.call("GET", path, reply=Actor, timeout_s=_CALL_S), _READ_S)
        self._object_id = actor.state_object
        if not self._object_id:
            return ()
        ref = self._objects.detached.import_ref(self._object_id)
        return (self._objects.get([ref], _READ_S)[0],)

    def store(self, state: Any, *, insists: bool) -> None:
        """Store a state in place of the one before; one that ``insists`` waits for a gcs that is away.

        Raises StokerError, and keeps the state before.
        """
        while True:
            try:
                self._store(state)
            except (UnavailableError, DeadlineExceededError) as error:
                if not insists:
                    raise
                text = "the calls of actor %s wait until its state is saved: %s"
                self._warn(text, error, type(error).__name__)
            else:
                return

    def failed(self, error: BaseException) -> None:
        """Log why a save failed, once per cause; the actor goes on."""
        text = "__stoker_save__ of actor %s failed: %s"
        self._warn(text, error, f"{type(error).__name__}: {error}")

    def _warn(self, text: str, error: BaseException, cause: str) -> None:
        if (text, cause) not in self._causes:
            self._causes.add((text, cause))
            name = f"{self._spec.class_name} ({self._spec.actor_id})"
            _log.warning(text, name, f"{type(error).__name__}: {error}", exc_info=error)

    def _store(self, state: Any) -> None:
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
        if before:
            with contextlib.suppress(StokerError):  # the gcs frees it later
                detached.free(before)
