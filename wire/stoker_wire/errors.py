"""The one error tree of Stoker, with codes that are stable across versions.

Each class is also the built-in exception that a Python programmer expects (right column), so that
``except ValueError`` and ``except ConnectionError`` mean what they say.

::

    StokerError
    ├── BadRequestError            bad_request          400  ValueError: the input; names the field
    │   ├── WrongTypeError         wrong_type           400  and TypeError
    │   └── UnknownOptionError     unknown_option       400  and TypeError
    ├── UnauthorizedError          unauthorized         401  PermissionError
    ├── ForbiddenError             forbidden            403  PermissionError: Host or Origin refused
    ├── NotFoundError              not_found            404  LookupError, ValueError
    ├── ConflictError              conflict             409  RuntimeError
    │   ├── NameTakenError         name_taken           409  and ValueError
    │   ├── FencedError            fenced               409  the incarnation or epoch is over
    │   ├── NotLeaderError         not_leader           409  another scheduler leads
    │   ├── IdempotencyError       idempotency_mismatch 409
    │   └── ProtocolError          protocol_mismatch    409  versions too far apart
    ├── CompactedError             compacted            410  LookupError: a watch starts too early
    ├── InfeasibleError            infeasible           422  RuntimeError: no node could ever run it
    ├── RuntimeEnvSetupError       runtime_env_failed   422  RuntimeError
    ├── PayloadTooLargeError       payload_too_large    413  ValueError
    ├── UnsupportedEncodingError   unsupported_encoding 415  ValueError: a compressed body
    ├── RateLimitedError           rate_limited         429  RuntimeError; retryable
    ├── PendingCallsLimitError     pending_calls_limit  429  RuntimeError: max_pending_calls
    ├── UnavailableError           unavailable          503  ConnectionError; retryable
    │   ├── NotReadyError          not_ready            503
    │   ├── ForeignPortError       foreign_port         503  another user listens where a service was expected
    │   └── TlsError               tls_failed           503  a certificate was refused
    ├── DeadlineExceededError      deadline_exceeded    504  TimeoutError
    │   └── GetTimeoutError        get_timeout          504
    ├── ArenaFullError             arena_full           507  MemoryError: names the largest holders
    ├── StartError                 start_failed         500  RuntimeError: a process did not start
    │   ├── PortInUseError         port_in_use          500  and OSError
    │   ├── OpenBindError          open_bind            500  and ValueError
    │   └── DatabaseError          database_unusable    500  not reachable, not migrated, or damaged
    ├── InternalError              internal             500  RuntimeError
    ├── SerializationError         unserializable       400  TypeError: names the bad member's path
    └── WorkFailedError            work_failed          what happened to a task, actor or object
        ├── TaskError              task_failed          the user's own type: the user's code raised
        ├── TaskCancelledError     task_cancelled       RuntimeError
        ├── TaskTimeoutError       task_timeout         TimeoutError
        ├── WorkerDiedError        worker_died          ConnectionError: with exit forensics
        │   ├── OutOfMemoryError   out_of_memory        and MemoryError
        │   └── PreemptedError     preempted            its place went to other work
        ├── ActorError             actor_failed         ConnectionError: base of what ends a call of an actor
        │   ├── ActorDiedError     actor_died
        │   └── ActorUnavailableError actor_unavailable 503  may be called again later
        ├── ObjectLostError        object_lost          410  LookupError
        │   ├── OwnerDiedError     owner_died           and ConnectionError
        │   └── ObjectFreedError   object_freed
        └── NodeDiedError          node_died            ConnectionError
            └── ObjectNodeDiedError object_node_died    also an ObjectLostError

Who raises: every component. Who translates: the HTTP server base turns an error into an RFC 9457
problem, the client base turns a problem back into the class of its ``code``. A worker's few routes,
which are no service's, use the same ``problem_response``; nothing else translates.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar, Final

_HEAP_TYPE = 1 << 9
"""The flag of classes that are made in Python; only others can make an instance."""
_SENTENCE_ENDS = (".", "!", "?", ":", "…")


class StokerError(Exception):
    """Root of all errors of Stoker.

    ``field`` names the input at fault, ``explain`` is a URL path that tells why something waits,
    ``extra`` holds data for programs (msgpack-able). The first line of ``message`` is one sentence;
    evidence and the fix follow on further lines. ``str()`` of an error ends that line with a full stop,
    unless a user's own text ends it with another sign, as a colon before more lines.
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
        first, newline, evidence = self.message.lstrip("\n").partition("\n")
        first = first.rstrip() if evidence else first.rstrip(" :")
        if first and not first.endswith(_SENTENCE_ENDS):
            first += "."
        return f"{first}{newline}{evidence}"

    @property
    def one_line(self) -> str:
        """The text as clauses in one line, for a terminal or within a sentence; a table stays one."""
        lines = self.message.strip().split("\n")
        if any(line.startswith(" ") or not line for line in lines):
            return str(self)
        return "; ".join([*(line.removesuffix(".") for line in lines[:-1]), lines[-1]])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.field, self.explain, self.extra)


def _rebuild(
    cls: type[StokerError],
    message: str,
    field: str | None,
    explain: str | None,
    extra: dict[str, Any],
) -> StokerError:
    layout: Any = cls
    while layout.__flags__ & _HEAP_TYPE:
        layout = layout.__base__
    error: StokerError = layout.__new__(cls)  # no __init__: that of a subclass may ask for anything
    StokerError.__init__(error, message, field=field, explain=explain, extra=extra)
    return error


class BadRequestError(StokerError, ValueError):
    """The caller's input is wrong; ``field`` names it and the message says how to mend it."""

    code = "bad_request"
    status = 400


class WrongTypeError(BadRequestError, TypeError):
    """An argument or option is of the wrong type; ``field`` names it."""

    code = "wrong_type"


class UnknownOptionError(BadRequestError, TypeError):
    """An option that does not exist; the message names the nearest one."""

    code = "unknown_option"


class UnauthorizedError(StokerError, PermissionError):
    """No token, or a wrong one."""

    code = "unauthorized"
    status = 401


class ForbiddenError(StokerError, PermissionError):
    """The Host or Origin header is not one this server answers to."""

    code = "forbidden"
    status = 403


class NotFoundError(StokerError, LookupError, ValueError):
    """The thing that the path or field names does not exist."""

    code = "not_found"
    status = 404


class ConflictError(StokerError, RuntimeError):
    """The change does not fit the present state."""

    code = "conflict"
    status = 409


class NameTakenError(ConflictError, ValueError):
    """The name is that of another living actor."""

    code = "name_taken"


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


class JobFinishedError(ConflictError):
    """The job has ended, and nothing runs for it any more."""

    code = "job_finished"

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of frames, none of which is the cause."""
        return [f"{type(self).__name__}: {self.one_line}"]


class CompactedError(StokerError, LookupError):
    """A watch asks for events older than those kept: list again, then watch from there."""

    code = "compacted"
    status = 410


class PayloadTooLargeError(StokerError, ValueError):
    """The request's body passes the limit that the message names."""

    code = "payload_too_large"
    status = 413


class UnsupportedEncodingError(StokerError, ValueError):
    """The request's body is compressed, or encoded in another way than its type says."""

    code = "unsupported_encoding"
    status = 415


class RateLimitedError(StokerError, RuntimeError):
    """The caller has asked too often; ``extra['retry_after_s']`` says when it may again."""

    code = "rate_limited"
    status = 429
    retryable = True


class PendingCallsLimitError(StokerError, RuntimeError):
    """The actor has ``max_pending_calls`` unfinished calls of this process already."""

    code = "pending_calls_limit"
    status = 429
    retryable = True


class InfeasibleError(StokerError, RuntimeError):
    """No node of the cluster could ever satisfy the request, even when idle."""

    code = "infeasible"
    status = 422


class PlacementGroupRemovedError(ConflictError):
    """The placement group was removed, so nothing runs in it any more."""

    code = "placement_group_removed"


class RuntimeEnvSetupError(StokerError, RuntimeError):
    """The runtime environment of a task, actor or job could not be made."""

    code = "runtime_env_failed"
    status = 422


class UnavailableError(StokerError, ConnectionError):
    """A component cannot be reached or cannot answer now; the same call may succeed later."""

    code = "unavailable"
    status = 503
    retryable = True

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in place of frames, none of which is the cause."""
        return [f"{type(self).__name__}: {self.one_line}"]


class NotReadyError(UnavailableError):
    """A service is up but has not loaded its state yet."""

    code = "not_ready"


class TlsError(UnavailableError):
    """A connection was refused for a certificate, one's own or the peer's; the message has the fix.

    A client does not try again by itself, as a person must mend it. Loops that outlive that go on.
    """

    code = "tls_failed"


class ForeignPortError(UnavailableError):
    """Another user of this machine listens on a port where a service was expected; nothing was sent there."""

    code = "foreign_port"


class DeadlineExceededError(StokerError, TimeoutError):
    """A wait passed its deadline; the message says what it waited for."""

    code = "deadline_exceeded"
    status = 504
    retryable = True


class GetTimeoutError(DeadlineExceededError):
    """``get`` passed its timeout; the message says which objects were missing and why."""

    code = "get_timeout"


class StartError(StokerError, RuntimeError):
    """A process of Stoker could not start."""

    code = "start_failed"


class PortInUseError(StartError, OSError):
    """The port is taken by another program."""

    code = "port_in_use"


class OpenBindError(StartError, ValueError):
    """A service was told to listen beyond loopback without a token."""

    code = "open_bind"


class DatabaseError(StartError):
    """The database cannot be reached, its schema is not the one this version needs, or a row is damaged."""

    code = "database_unusable"


class InternalError(StokerError, RuntimeError):
    """A bug in Stoker; the service's log has the trace under the request id."""

    code = "internal"


class SerializationError(StokerError, TypeError):
    """A value cannot be pickled (or read back); the message names the path of the bad member."""

    code = "unserializable"
    status = 400


class WorkFailedError(StokerError):
    """Root of what can happen to a task, an actor or an object."""

    code = "work_failed"


class TaskError(WorkFailedError):
    """The user's code raised. Also an instance of the user's exception type, where that can be.

    ``cause`` is the user's exception itself, None where it could not travel.
    """

    code = "task_failed"
    cause: BaseException | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (*super().__reduce__(), {"cause": self.cause} if self.cause is not None else None)


class TaskCancelledError(WorkFailedError, RuntimeError):
    """The task was cancelled before it finished."""

    code = "task_cancelled"


class TaskTimeoutError(WorkFailedError, TimeoutError):
    """The task ran longer than its ``timeout`` option, or did not start by ``start_deadline``."""

    code = "task_timeout"


class WorkerDiedError(WorkFailedError, ConnectionError):
    """The worker process died while it ran the task; ``extra`` holds the exit forensics."""

    code = "worker_died"


class OutOfMemoryError(WorkerDiedError, MemoryError):
    """The worker was killed because it used more memory than allowed."""

    code = "out_of_memory"


class PreemptedError(WorkerDiedError):
    """The worker was ended to make room for other work; the message says for which."""

    code = "preempted"


class ActorError(WorkFailedError, ConnectionError):
    """The actor could not be called: it is dead, or out of reach for now."""

    code = "actor_failed"


class ActorDiedError(ActorError):
    """The actor is dead and will not come back; the message says the cause."""

    code = "actor_died"


class ActorUnavailableError(ActorError):
    """The actor is restarting or out of reach; a call may or may not have run."""

    code = "actor_unavailable"
    status = 503


class ArenaFullError(StokerError, MemoryError):
    """A node's shared memory has no room for an object, nor could room be made by spilling."""

    code = "arena_full"
    status = 507


class ObjectLostError(WorkFailedError, LookupError):
    """An object's bytes are gone."""

    code = "object_lost"
    status = 410


class OwnerDiedError(ObjectLostError, ConnectionError):
    """The process that owned the object is gone, and the object with it."""

    code = "owner_died"


class ObjectFreedError(ObjectLostError):
    """The object was freed by its owner before this use."""

    code = "object_freed"


class NodeDiedError(WorkFailedError, ConnectionError):
    """The node that ran the work was declared dead; the message says which and since when."""

    code = "node_died"


class ObjectNodeDiedError(NodeDiedError, ObjectLostError):
    """The node that held the object was declared dead, and the object is lost with it."""

    code = "object_node_died"


def _all(cls: type[StokerError]) -> list[type[StokerError]]:
    return [cls, *(below for sub in cls.__subclasses__() for below in _all(sub))]


_BY_CODE: Final = MappingProxyType({cls.code: cls for cls in _all(StokerError)})


def error_classes() -> MappingProxyType[str, type[StokerError]]:
    """Return the class of each code."""
    return _BY_CODE


def error_for(
    code: str,
    message: str,
    *,
    field: str | None = None,
    explain: str | None = None,
    extra: dict[str, Any] | None = None,
) -> StokerError:
    """Return the error of ``code``; an unknown code (a newer peer) becomes a plain StokerError."""
    return _rebuild(_BY_CODE.get(code, StokerError), message, field, explain, extra or {})
