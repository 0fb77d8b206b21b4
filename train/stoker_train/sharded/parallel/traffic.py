"""The bytes that a rank exchanges with others, by kind of collective and by dimension of the mesh.

Every collective of torch passes here as an op: those of FSDP2 and pipelines (``c10d``) and those of tensor
parallelism (``_c10d_functional``). Called by tests and benchmarks, and by whoever wants to know; it must not
change what is exchanged.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _groups
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

# The kind of each op, and which of its tensors is the payload: all that takes part, once.
_INPUT, _OUTPUT, _GATHERED = "input", "output", "gathered"
_OPS = {
    "c10d::allreduce_": ("all_reduce", _INPUT),
    "c10d::allreduce_coalesced_": ("all_reduce", _INPUT),
    "c10d::_allgather_base_": ("all_gather", _OUTPUT),
    "c10d::allgather_": ("all_gather", _OUTPUT),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", _OUTPUT),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", _INPUT),
    "c10d::reduce_scatter_": ("reduce_scatter", _INPUT),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", _INPUT),
    "c10d::broadcast_": ("broadcast", _INPUT),
    "c10d::alltoall_base_": ("all_to_all", _INPUT),
    "c10d::alltoall_": ("all_to_all", _INPUT),
    "c10d::send": ("send", _INPUT),
    "c10d::recv_": ("recv", _INPUT),
    "_c10d_functional::all_reduce": ("all_reduce", _INPUT),
    "_c10d_functional::all_reduce_": ("all_reduce", _INPUT),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", _INPUT),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", _GATHERED),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", _GATHERED),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", _GATHERED),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", _INPUT),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", _INPUT),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", _INPUT),
    "_c10d_functional::broadcast": ("broadcast", _INPUT),
    "_c10d_functional::all_to_all_single": ("all_to_all", _INPUT),
}
# Ops of c10d write into their first argument; what they read is the second.
_READS_SECOND = {
    "_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_",
    "alltoall_base_", "alltoall_",
}  # fmt: skip
_ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}

Key = tuple[str, str]
"""A kind of collective and the name of a dimension."""


@dataclass(slots=True)
class Traffic:
    """Bytes that were counted.

    ``bytes``: the payload V by (kind, dimension): the whole tensor that is reduced, gathered, scattered or
    sent. ``calls``: how often. ``sent``: what this rank sends of it by the ring's convention over n ranks:
    V (n - 1) / n to gather or reduce-scatter, twice that to all-reduce, V to send or broadcast.
    """

    bytes: Counter[Key] = field(default_factory=Counter)
    calls: Counter[Key] = field(default_factory=Counter)
    sent: dict[Key, float] = field(default_factory=dict)

    def total_sent(self, dim: str | None = None) -> float:
        """Return the bytes that this rank sent, over one dimension of the mesh or all."""
        return sum(sent for (_, where), sent in self.sent.items() if dim in (None, where))

    def add(self, kind: str, dim: str, nbytes: int, ranks: int) -> None:
        """Count one exchange of ``nbytes`` among ``ranks``."""
        key = (kind, dim)
        self.bytes[key] += nbytes
        self.calls[key] += 1
        self.sent[key] = self.sent.get(key, 0.0) + nbytes * _share(kind, ranks)


def _share(kind: str, ranks: int) -> float:
    """Return what a rank sends of a payload."""
    if kind in _ROUNDS:
        return _ROUNDS[kind] * (ranks - 1) / ranks
    return 0.0 if kind == "recv" else 1.0


@contextmanager
def count(mesh: DeviceMesh | None = None) -> Iterator[Traffic]:
    """Count what this process exchanges inside of it, in forward and backward passes.

    Dimensions have the names of ``mesh``; without it, of the mesh that made the group, or of the group.
    """
    traffic = Traffic()
    names = {}
    if mesh is not None:
        for dim in mesh.mesh_dim_names or ():
            names[str(mesh.get_group(dim).group_name)] = dim
    with _Counting(traffic, names):
        yield traffic


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, traffic: Traffic, names: dict[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic = traffic
        self._names = names

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it comes again as the exchanges that it takes
        found = _OPS.get(func.name().split(".")[0])
        if found is not None:
            kind, payload = found
            group = _group_of(args)
            if group is not None:
                nbytes = _nbytes(_payload(func, payload, args))
                if payload == _GATHERED:
                    nbytes *= group.size()
                self._traffic.add(kind, self._dim(group), nbytes, group.size())
        return func(*args, **(kwargs or {}))

    def _dim(self, group: dist.ProcessGroup) -> str:
        name = self._names.get(str(group.group_name))
        return name or group.group_desc.removeprefix("mesh_")


def _payload(func: Any, payload: str, args: tuple[Any, ...]) -> Any:
    second = func._schema.name.split("::")[1] in _READS_SECOND
    return args[1] if payload == _INPUT and second else args[0]


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the group among an op's arguments: an object of C++, or its name."""
    for one in args:
        if isinstance(one, dist.ProcessGroup):
            return one
        if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type()):
            return dist.ProcessGroup.unbox(one)
    for one in reversed(args):
        if isinstance(one, str):
            group: dist.ProcessGroup = _groups._resolve_process_group(one)  # type: ignore[attr-defined,arg-type]
            return group
    return None


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
