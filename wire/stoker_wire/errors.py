"""The one error tree of Stoker, with codes that are stable across versions.

::

    StokerError
    ├── BadRequestError            bad_request          400  the caller's input; names the field
    │   └── UnknownOptionError     unknown_option       400
    ├── UnauthorizedError          unauthorized         401
    ├── ForbiddenError             forbidden            403  Host or Origin refused
    ├── NotFoundError              not_found            404
    ├── ConflictError              conflict             409
    │   ├── FencedError            fenced               409  the sender's incarnation or epoch is over
    │   ├── NotLeaderError         not_leader           409  another scheduler leads
    │   ├── IdempotencyError       idempotency_mismatch 409
    │   └── ProtocolError          protocol_mismatch    409  versions too far apart
    ├── CompactedError             compacted            410  a watch starts before what is kept
    ├── InfeasibleError            infeasible           422  no node could ever run it
    ├── RuntimeEnvSetupError       runtime_env_failed   422
    ├── PayloadTooLargeError       payload_too_large    413
    ├── UnavailableError           unavailable          503  retryable: not there now
    │   └── NotReadyError          not_ready            503
    ├── DeadlineExceededError      deadline_exceeded    504
    │   └── GetTimeoutError        get_timeout          504  also a TimeoutError
    ├── ArenaFullError             arena_full           507  names the largest holders
    ├── StartError                 start_failed         500  a process could not start
    │   ├── PortInUseError         port_in_use          500
    │   ├── OpenBindError          open_bind            500
    │   └── DatabaseError          database_unusable    500  not reachable, or not migrated
    ├── InternalError              internal             500
    ├── SerializationError         unserializable       400  names the path of the bad member
    └── WorkFailedError            work_failed          what happened to a task, actor or object
        ├── TaskError              task_failed          the user's code raised
        ├── TaskCancelledError     task_cancelled
        ├── TaskTimeoutError       task_timeout
        ├── WorkerDiedError        worker_died          with exit forensics
        │   └── OutOfMemoryError   out_of_memory
        ├── ActorDiedError         actor_died
        ├── ActorUnavailableError  actor_unavailable    restarting: may be called again later
        ├── ObjectLostError        object_lost
        │   ├── OwnerDiedError     owner_died
        │   └── ObjectFreedError   object_freed
        └── NodeDiedError          node_died

Who raises: every component. Who translates: the HTTP server base turns an error into an RFC 9457
problem, the client base turns a problem back into the class of its ``code``. Nothing else may.
"""

from __future__ import annotations

from typing import Any, ClassVar


class StokerError(Exception):
    """Root of all errors of Stoker.

    ``field`` names the input at fault, ``explain`` is a URL path that tells why something waits,
    ``extra`` holds facts for programs (msgpack-able).
    """

    code: ClassVar[str] = "stoker_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        explain: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.explain = explain
        self.extra = extra or {}

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.field, self.explain, self.extra)


def _rebuild(
    cls: type[StokerError],
    message: str,
    field: str | None,
    explain: str | None,
    extra: dict[str, Any],
) -> StokerError:
    error = cls.__new__(cls)
    StokerError.__init__(error, message, field=field, explain=explain, extra=extra)
    return error


class BadRequestError(StokerError):
    """The caller's input is wrong; ``field`` names it and the message says how to mend it."""

    code = "bad_request"
    status = 400


class UnknownOptionError(BadRequestError):
    """An option that does not exist; the message names the nearest one."""

    code = "unknown_option"


class UnauthorizedError(StokerError):
    """No token, or a wrong one."""

    code = "unauthorized"
    status = 401


class ForbiddenError(StokerError):
    """The Host or Origin header is not one this server answers to."""

    code = "forbidden"
    status = 403


class NotFoundError(StokerError):
    """What the path or field names does not exist."""

    code = "not_found"
    status = 404


class ConflictError(StokerError):
    """The change does not fit the present state."""

    code = "conflict"
    status = 409


class FencedError(ConflictError):
    """The sender acts for an incarnation or epoch that is over."""

    code = "fenced"


class NotLeaderError(ConflictError):
    """This scheduler does not lead; ``extra['leader']`` is the URL of the one that does."""

    code = "not_leader"
    retryable = True


class IdempotencyError(ConflictError):
    """An Idempotency-Key was used again with another body."""

    code = "idempotency_mismatch"


class ProtocolError(ConflictError):
    """Two components are more than one minor version apart."""

    code = "protocol_mismatch"


class CompactedError(StokerError):
    """A watch asks for events older than those kept: list again, then watch from there."""

    code = "compacted"
    status = 410


class PayloadTooLargeError(StokerError):
    """The request's body passes the limit that the message names."""

    code = "payload_too_large"
    status = 413


class InfeasibleError(StokerError):
    """No node of the cluster could ever satisfy the request, even when idle."""

    code = "infeasible"
    status = 422


class RuntimeEnvSetupError(StokerError):
    """The runtime environment of a task, actor or job could not be made."""

    code = "runtime_env_failed"
    status = 422


class UnavailableError(StokerError):
    """A component cannot be reached or cannot answer now; the same call may succeed later."""

    code = "unavailable"
    status = 503
    retryable = True


class NotReadyError(UnavailableError):
    """A service is up but has not loaded its state yet."""

    code = "not_ready"


class DeadlineExceededError(StokerError, TimeoutError):
    """A wait passed its deadline; the message says what it waited for."""

    code = "deadline_exceeded"
    status = 504
    retryable = True


class GetTimeoutError(DeadlineExceededError):
    """``get`` passed its timeout; the message says which objects were missing and why."""

    code = "get_timeout"


class StartError(StokerError):
    """A process of Stoker could not start."""

    code = "start_failed"


class PortInUseError(StartError):
    """The port is taken by another program."""

    code = "port_in_use"


class OpenBindError(StartError):
    """A service was told to listen beyond loopback without a token."""

    code = "open_bind"


class DatabaseError(StartError):
    """The database cannot be reached, or its schema is not the one this version needs."""

    code = "database_unusable"


class InternalError(StokerError):
    """A bug in Stoker; the service's log has the trace under the request id."""

    code = "internal"


class SerializationError(StokerError):
    """A value cannot be pickled (or read back); the message names the path of the bad member."""

    code = "unserializable"
    status = 400


class WorkFailedError(StokerError):
    """Root of what can happen to a task, an actor or an object."""

    code = "work_failed"


class TaskError(WorkFailedError):
    """The user's code raised. Also an instance of the user's exception type, where that can be."""

    code = "task_failed"


class TaskCancelledError(WorkFailedError):
    """The task was cancelled before it finished."""

    code = "task_cancelled"


class TaskTimeoutError(WorkFailedError, TimeoutError):
    """The task ran longer than its ``timeout`` option, or did not start by ``start_deadline``."""

    code = "task_timeout"


class WorkerDiedError(WorkFailedError):
    """The worker process died while it ran the task; ``extra`` holds the exit forensics."""

    code = "worker_died"


class OutOfMemoryError(WorkerDiedError):
    """The worker was killed because it used more memory than allowed."""

    code = "out_of_memory"


class ActorDiedError(WorkFailedError):
    """The actor is dead and will not come back; the message says the cause."""

    code = "actor_died"


class ActorUnavailableError(WorkFailedError):
    """The actor is restarting or out of reach; a call may or may not have run."""

    code = "actor_unavailable"
    status = 503


class ArenaFullError(StokerError):
    """A node's shared memory has no room for an object, nor could room be made by spilling."""

    code = "arena_full"
    status = 507


class ObjectLostError(WorkFailedError):
    """An object's bytes are gone."""

    code = "object_lost"


class OwnerDiedError(ObjectLostError):
    """The process that owned the object is gone, and the object with it."""

    code = "owner_died"


class ObjectFreedError(ObjectLostError):
    """The object was freed by its owner before this use."""

    code = "object_freed"


class NodeDiedError(WorkFailedError):
    """The node that ran the work is gone."""

    code = "node_died"


def _tree(cls: type[StokerError]) -> dict[str, type[StokerError]]:
    # A subclass that inherits its code (a user's, or a remote exception's) does not stand for it.
    found = {cls.code: cls} if "code" in vars(cls) else {}
    for sub in cls.__subclasses__():
        found = {**_tree(sub), **found}
    return found


def error_for(
    code: str,
    message: str,
    *,
    field: str | None = None,
    explain: str | None = None,
    extra: dict[str, Any] | None = None,
) -> StokerError:
    """Return the error of ``code``; an unknown code (a newer peer) becomes a plain StokerError."""
    cls = _tree(StokerError).get(code, StokerError)
    return _rebuild(cls, message, field, explain, extra or {})
