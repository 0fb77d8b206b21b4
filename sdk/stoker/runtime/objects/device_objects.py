"""Objects whose tensors stay in the GPU memory of the process that put them.

``stoker.put(value, tensor_transport="cuda_ipc")`` calls it. The object itself is an ordinary one, small and
inline, with handles in place of bytes; a mark among its children is freed with it, and with the mark the
lent memory. So the counting of refs that all objects have decides how long the memory is kept, and an owner
that dies is the error that it is for every object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError
from stoker.runtime.objects.refs import ObjectRef
from stoker.runtime.serialization.pickling import pack

if TYPE_CHECKING:
    from stoker.runtime.objects.store import ObjectStore

CUDA_IPC = "cuda_ipc"


def put_on_device(objects: ObjectStore, value: Any, tensor_transport: object) -> ObjectRef[Any]:
    """Store a value whose CUDA tensors stay where they are; return its ref.

    BadRequestError for another transport; SerializationError where CUDA does not lend the memory.
    """
    if tensor_transport != CUDA_IPC:
        raise BadRequestError(
            f"put(): tensor_transport={tensor_transport!r} is not known\n"
            f"give {CUDA_IPC!r}, or leave it out: then tensors go through host memory",
            field="tensor_transport",
        )
    if isinstance(value, ObjectRef):
        return objects.put(value)  # which says why not
    try:
        from stoker.runtime.serialization import cuda_ipc
    except ImportError:
        return objects.put(value)  # without torch there are no tensors
    lending = cuda_ipc.Lending(cuda_ipc.CudaIpcMemory())
    packed = pack(value, what="value", lend=lending.lend)
    if not lending.copies:
        return objects.put_packed(packed)
    mark = objects.new_mark(lambda _: lending.revoke())
    return objects.put_packed(packed, (mark,))
