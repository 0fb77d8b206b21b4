"""Objects whose tensors stay in the memory of the process that put them.

``stoker.put(value, tensor_transport=...)`` calls it: ``"cuda_ipc"`` lends CUDA memory to processes of the
node, ``"collective"`` (or ``"collective:GROUP"``) to the members of a group of ``stoker.collective``. The
object itself is an ordinary one, small and inline, with stand-ins in place of bytes; a mark among its
children is freed with it, and with the mark the lent memory. So the counting of refs that all objects have
decides how long the memory is kept, and an owner that dies is the error that it is for every object.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from stoker.exceptions import BadRequestError
from stoker.runtime.objects.refs import ObjectRef
from stoker.runtime.serialization.pickling import pack

if TYPE_CHECKING:
    from stoker.runtime.objects.store import ObjectStore

CUDA_IPC = "cuda_ipc"
COLLECTIVE = "collective"
_DEFAULT_GROUP = "default"


class Lending(Protocol):
    """The tensors of one value that are lent, until they are revoked."""

    copies: list[Any]

    def lend(self, flat: Any) -> Any:
        """Return what travels in place of a contiguous tensor's bytes; None: the bytes."""

    def revoke(self) -> None:
        """End the loans."""


def put_on_device(objects: ObjectStore, value: Any, tensor_transport: object) -> ObjectRef[Any]:
    """Store a value whose CUDA tensors stay where they are; return its ref.

    BadRequestError for another transport; SerializationError where CUDA does not lend the memory;
    NotFoundError where this process is in no such group.
    """
    if isinstance(value, ObjectRef):
        return objects.put(value)  # which says why not
    try:
        lending = _lending(tensor_transport)
    except ImportError:
        return objects.put(value)  # without torch there are no tensors
    try:
        packed = pack(value, what="value", lend=lending.lend)
    except BaseException:
        lending.revoke()  # of the tensors before what could not be packed
        raise
    if not lending.copies:
        return objects.put_packed(packed)
    mark = objects.new_mark(lambda _: lending.revoke())
    return objects.put_packed(packed, (mark,))


def _lending(tensor_transport: object) -> Lending:
    if tensor_transport == CUDA_IPC:
        from stoker.runtime.serialization import cuda_ipc

        return cuda_ipc.Lending(cuda_ipc.CudaIpcMemory())
    kind, separator, group = str(tensor_transport).partition(":")
    if kind == COLLECTIVE and (group or not separator):
        # Built on this package: loaded when it is asked for.
        lending = importlib.import_module("stoker_train.collective.lending.loans")
        found: Lending = lending.lending_of(group or _DEFAULT_GROUP)
        return found
    raise BadRequestError(
        f"put(): tensor_transport={tensor_transport!r} is not known\n"
        f"give {CUDA_IPC!r}, {COLLECTIVE!r} or 'collective:GROUP', or leave it out: then tensors go through "
        "host memory",
        field="tensor_transport",
    )
