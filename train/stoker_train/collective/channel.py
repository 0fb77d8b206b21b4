"""The connections of a set of processes: torch's ProcessGroups, made directly from a store.

So torch's default group stays free for the user, and a process may be in many. Each operation blocks the
calling thread (NCCL's: its stream); lanes call them in the order that all members share. CPU tensors always
travel by gloo; with the backend ``"nccl"`` there is an NCCL group as well, for CUDA tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from stoker.exceptions import BadRequestError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

R = TypeVar("R")


class ReduceOp(StrEnum):
    """The ways in which an all-reduce, reduce or reduce-scatter combines the members' values."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    MEAN = "mean"


class Backend(StrEnum):
    """The libraries that carry the tensors."""

    GLOO = "gloo"
    NCCL = "nccl"


class TransportError(Exception):
    """A connection failed, or an operation of torch's; for lanes only, who tell the supervisor."""


_GLOO_LACKS = ("torch.bool", "torch.complex64", "torch.complex128", "torch.int16")


class Channel:
    """The connections of ``size`` processes, of which this is number ``rank``.

    Making one is itself collective: it returns once all members are connected. It closes when the last
    reference to it goes, so only lanes keep one.
    """

    def __init__(
        self, backend: Backend, store: Store, rank: int, size: int, timeout_s: float
    ) -> None:
        from torch.distributed import (  # type: ignore[attr-defined]
            PrefixStore,
            ProcessGroupGloo,
        )

        self.rank = rank
        self.size = size
        limit = timedelta(seconds=timeout_s)
        self._host: Any = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, limit)
        self._device: Any = None
        if backend is Backend.NCCL:
            self._device = _nccl(PrefixStore("nccl", store), rank, size, limit)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Replace ``tensor`` on all members by the combination of all."""
        import torch.distributed as dist

        options = dist.AllreduceOptions()
        options.reduceOp = _torch_op(op)
        self._before(tensor, op)
        self._do("allreduce", tensor, [tensor], options)
        self._after(tensor, op)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> None:
        """Do as :meth:`all_reduce`, for member ``root`` alone; what others have then is undefined."""
        import torch.distributed as dist

        options = dist.ReduceOptions()
        options.reduceOp = _torch_op(op)
        options.rootRank = root
        self._before(tensor, op)
        self._do("reduce", tensor, [tensor], options)
        if self.rank == root:
            self._after(tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replace ``tensor`` by that of member ``root``."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._do("broadcast", tensor, [_raw(tensor)], options)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the members' tensors, stacked in order of rank."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        self._do("_allgather_base", tensor, _raw(gathered), _raw(tensor))
        return gathered

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return this member's part of the combination of ``tensor``, of shape (size, ...)."""
        import torch.distributed as dist

        options = dist.ReduceScatterOptions()
        options.reduceOp = _torch_op(op)
        part = tensor.new_empty(tensor.shape[1:])
        self._before(tensor, op)
        self._do("_reduce_scatter_base", tensor, part.view(-1), tensor.view(-1), options)
        self._after(part, op)
        return part

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send ``tensor`` to member ``to``, who receives it."""
        self._do("send", tensor, [tensor], to, 0)

    def recv(self, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` with what member ``source`` sends."""
        self._do("recv", tensor, [tensor], source, 0)

    def barrier(self) -> None:
        """Return once all members have called it."""
        self._do("barrier", None)

    def abort(self) -> None:
        """End what hangs on a GPU. gloo has no such thing: its operations end as connections close."""
        if self._device is not None:
            self._device.abort()

    def _do(self, name: str, tensor: torch.Tensor | None, *args: Any) -> None:
        on_device = tensor is not None and tensor.is_cuda and self._device is not None
        group = self._device if on_device else self._host
        try:
            getattr(group, name)(*args).wait()
        except (RuntimeError, ValueError) as error:
            # Its text alone: a traceback would keep this channel, and so its connections, alive.
            text = str(error).strip().partition("\n")[0]
        else:
            return
        raise TransportError(text)

    def _before(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.MEAN and tensor.element_size() < 4:
            tensor.div_(self.size)  # first: half precision overflows no sooner than a member

    def _after(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        if op is ReduceOp.MEAN and tensor.element_size() >= 4:
            tensor.div_(self.size)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor: what is only moved needs no type that gloo knows."""
    import torch

    return tensor.view(-1).view(torch.uint8)


def combined(table: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return the combination of ``table`` along its first dimension: the same bits on all members."""
    if op is ReduceOp.MIN:
        return table.amin(0)
    if op is ReduceOp.MAX:
        return table.amax(0)
    if op is ReduceOp.PRODUCT:
        return table.prod(0, dtype=table.dtype)
    if op is ReduceOp.MEAN:
        import torch

        wide = torch.promote_types(table.dtype, torch.float32)  # a sum of halves may overflow
        return table.to(wide).mean(0).to(table.dtype)
    return table.sum(0, dtype=table.dtype)


def check_reducible(tensor: torch.Tensor, op: ReduceOp) -> None:
    """Raise BadRequestError for a dtype that the operation cannot take."""
    if not tensor.is_cuda and str(tensor.dtype) in _GLOO_LACKS:
        raise BadRequestError(
            f"tensors of {tensor.dtype} cannot be reduced\nconvert it first: tensor.to(torch.uint8)",
            field="tensor",
        )
    if op is ReduceOp.MEAN and not tensor.is_floating_point():
        raise BadRequestError(
            f"a mean of {tensor.dtype} is not defined\nuse op='sum', or convert it to float",
            field="op",
        )


def usable(backend: str | Backend | None) -> Backend:
    """Return the backend by its name; NCCL where None is given and this process sees a GPU.

    Raises BadRequestError for one that is unknown, or that this torch lacks.
    """
    import torch
    import torch.distributed as dist

    if backend is None:
        backend = Backend.NCCL if torch.cuda.is_available() else Backend.GLOO
    try:
        found = Backend(str(backend).lower())
    except ValueError:
        raise BadRequestError(
            f"there is no backend {str(backend)!r}\ngive 'gloo' or 'nccl'", field="backend"
        ) from None
    if found is Backend.NCCL and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise BadRequestError(
            "NCCL cannot be used by this process\n"
            "it needs a torch with NCCL and a GPU: give the actor num_gpus=1, or use backend='gloo'",
            field="backend",
        )
    return found


def reduce_op(op: str | ReduceOp) -> ReduceOp:
    """Return the operation by its name; BadRequestError lists the names."""
    try:
        return ReduceOp("mean" if str(op).lower() == "average" else str(op).lower())
    except ValueError:
        raise BadRequestError(
            f"there is no op {str(op)!r}\ngive one of {', '.join(ReduceOp)}", field="op"
        ) from None


def _torch_op(op: ReduceOp) -> Any:
    from torch.distributed import ReduceOp as TorchOp

    return TorchOp.SUM if op is ReduceOp.MEAN else getattr(TorchOp, op.name)


def _nccl(store: Store, rank: int, size: int, limit: timedelta) -> Any:
    # 2: a communicator that fails is cleaned up, and the process lives on to hear of it.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    import torch
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    group: Any = ProcessGroupNCCL(store, rank, size, options)
    group.allreduce([torch.zeros(1, device="cuda")]).wait()  # connects now, and not in a step
    return group


def ordered(
    tensor: torch.Tensor | None, function: Callable[[Channel], R]
) -> Callable[[Channel], R]:
    """Return ``function`` for the thread of a lane, behind what this thread's stream does to ``tensor``.

    On a GPU it runs on a stream of its own, so that computation goes on meanwhile, and ends when that has.
    """
    if tensor is None or not tensor.is_cuda:
        return function
    import torch

    device = tensor.device
    ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(device))

    def run(channel: Channel) -> R:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            result = function(channel)
        stream.synchronize()
        return result

    return run
