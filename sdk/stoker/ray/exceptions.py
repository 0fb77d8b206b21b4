"""Ray's exceptions: each is the class of Stoker's that is raised in the same case."""

from __future__ import annotations

from typing import Any

from stoker.exceptions import (
    ActorDiedError,
    ActorError,
    ActorUnavailableError,
    ArenaFullError,
    GetTimeoutError,
    InfeasibleError,
    InternalError,
    NameTakenError,
    NodeDiedError,
    NotFoundError,
    ObjectFreedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    PendingCallsLimitError,
    PlacementGroupRemovedError,
    RuntimeEnvSetupError,
    SerializationError,
    StokerError,
    TaskCancelledError,
    TaskError,
    UnauthorizedError,
    UnavailableError,
    WorkerDiedError,
)
from stoker.ray.mapping.lacking import attribute_error

RayError = RayException = StokerError
RayTaskError = UserCodeException = TaskError
RayActorError = ActorError
ActorAlreadyExistsError = NameTakenError
ActorHandleNotFoundError = NotFoundError
ActorPlacementGroupRemoved = TaskPlacementGroupRemoved = PlacementGroupRemovedError
ActorUnschedulableError = TaskUnschedulableError = InfeasibleError
AsyncioActorExit = SystemExit
AuthenticationError = UnauthorizedError
LocalRayletDiedError = NodeDiedError
ObjectFetchTimedOutError = ObjectReconstructionFailedError = ObjectLostError
ObjectReconstructionFailedMaxAttemptsExceededError = ObjectLostError
ObjectReconstructionFailedLineageEvictedError = ObjectLostError
ObjectRefStreamEndOfStreamError = StopIteration
ObjectStoreFullError = OutOfDiskError = ArenaFullError
OufOfBandObjectRefSerializationException = SerializationError
PendingCallsLimitExceeded = PendingCallsLimitError
PlasmaObjectNotAvailable = ObjectLostError
RaySystemError = CrossLanguageError = InternalError
ReferenceCountingAssertionError = ObjectFreedError
RpcError = UnavailableError
UnserializableException = SerializationError
WorkerCrashedError = WorkerDiedError

__all__ = (
    "ActorAlreadyExistsError",
    "ActorDiedError",
    "ActorHandleNotFoundError",
    "ActorPlacementGroupRemoved",
    "ActorUnavailableError",
    "ActorUnschedulableError",
    "AsyncioActorExit",
    "AuthenticationError",
    "CrossLanguageError",
    "GetTimeoutError",
    "LocalRayletDiedError",
    "NodeDiedError",
    "ObjectFetchTimedOutError",
    "ObjectFreedError",
    "ObjectLostError",
    "ObjectReconstructionFailedError",
    "ObjectReconstructionFailedLineageEvictedError",
    "ObjectReconstructionFailedMaxAttemptsExceededError",
    "ObjectRefStreamEndOfStreamError",
    "ObjectStoreFullError",
    "OufOfBandObjectRefSerializationException",
    "OutOfDiskError",
    "OutOfMemoryError",
    "OwnerDiedError",
    "PendingCallsLimitExceeded",
    "PlasmaObjectNotAvailable",
    "RayActorError",
    "RayError",
    "RayException",
    "RaySystemError",
    "RayTaskError",
    "ReferenceCountingAssertionError",
    "RpcError",
    "RuntimeEnvSetupError",
    "TaskCancelledError",
    "TaskPlacementGroupRemoved",
    "TaskUnschedulableError",
    "UnserializableException",
    "UserCodeException",
    "WorkerCrashedError",
)


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
