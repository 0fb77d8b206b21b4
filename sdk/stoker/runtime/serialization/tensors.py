"""Torch tensors as out-of-band buffers: their bytes leave without a copy and arrive as a mapping.

Used by ``pickling`` alone, and imported only where torch is loaded or a tensor arrives. Nothing is
registered with ``copyreg``: ``torch.save`` and users' own pickles stay as they are.

A tensor ships the bytes between its first and its last element, never the rest of its storage;
where that span has gaps it ships a contiguous copy. Tensors of one value that cover exactly the same
bytes (tied weights) travel once and share their memory on arrival; other overlaps arrive apart.

A tensor that arrives may be written to. In the arena it is a view of a copy-on-write
mapping, made for this value: a write changes the pages of this value alone. In other
memory (small values: in a message) it is a copy.

CUDA tensors go through host memory (``docs/adr/0007-torch-tensors.md``), unless the packer lends them.
"""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

try:
    import numpy as np
except ImportError:  # torch runs without it: its tensors then go by torch's own way, with copies
    np = None  # type: ignore[assignment]

_DEVICES = frozenset({"cpu", "cuda"})
_Reduced = tuple[Any, ...]


class Loan(Protocol):
    """A stand-in for the bytes of a tensor that stay where they are."""

    def borrow(self) -> torch.UntypedStorage:
        """Return a storage with a copy of them, in the process that reads."""


class TensorPickling:
    """The pickling of one value's tensors: a dispatch table, and the memory met so far.

    ``lend`` may take the bytes of a tensor: what it returns travels in their place.
    """

    def __init__(self, lend: Callable[[torch.Tensor], Loan | None] | None = None) -> None:
        self._lend = lend
        self.table: dict[type, Callable[[Any], Any]] = {}
        if np is not None:
            self.table = {torch.Tensor: self._reduce, torch.nn.Parameter: self._reduce}
        self._blocks: dict[tuple[Any, ...], _Block] = {}

    def forget(self) -> None:
        """Release the tensors of the value that was pickled."""
        self._blocks.clear()

    def _reduce(self, tensor: torch.Tensor) -> _Reduced:
        if (
            tensor.layout is not torch.strided
            or tensor.device.type not in _DEVICES
            or tensor.is_quantized
        ):
            return _by_torch(tensor)
        plain = tensor.detach().resolve_conj().resolve_neg()
        size = tuple(plain.size())
        strides, span = _packed_layout(size, plain.stride())
        key = (plain.device, plain.data_ptr(), plain.dtype, span or (size, plain.stride()))
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(plain, span, self._lend)
        is_parameter = type(tensor) is torch.nn.Parameter
        arguments = (block, plain.dtype, size, strides, tensor.requires_grad, is_parameter)
        if not tensor.__dict__:
            return rebuild, arguments
        # As state, which is pickled after the tensor and so may refer to it.
        return rebuild, arguments, tensor.__dict__, None, None, set_attributes


def _by_torch(tensor: Any) -> _Reduced:
    return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-any-return]


def _packed_layout(size: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return the strides in which a tensor travels, and its span in elements (0: must be copied).

    The span may travel as it is if it has no more elements than the tensor, repetitions (stride 0)
    not counted. Otherwise the strides are those of a contiguous copy, repetitions still at 0.
    """
    if 0 in size:
        return strides, 0
    span = count = 1
    for length, stride in zip(size, strides, strict=True):
        span += (length - 1) * stride
        count *= length if stride else 1
    if span <= count:
        return strides, span
    dense: list[int] = []
    step = 1
    for length, stride in zip(reversed(size), reversed(strides), strict=True):
        dense.append(step if stride else 0)
        step *= length if stride else 1
    return tuple(reversed(dense)), 0


class _Block:
    """The bytes of one or more tensors, in host memory or lent. It keeps the memory that it was made from."""

    def __init__(
        self,
        tensor: torch.Tensor,
        span: int,
        lend: Callable[[torch.Tensor], Loan | None] | None = None,
    ) -> None:
        self._source = tensor  # while it lives, its address means this memory
        if span:
            flat = tensor.as_strided((span,), (1,))
        else:
            size, strides = tensor.size(), tensor.stride()
            distinct = [n if stride else 1 for n, stride in zip(size, strides, strict=True)]
            flat = tensor.as_strided(distinct, strides).contiguous().view(-1)
        self._loan = None if lend is None else lend(flat)
        if self._loan is not None:
            return
        self._origin = _uuid_of(flat.device.index) if flat.is_cuda else None
        flat = flat.cpu()
        self._bytes = _array_at(flat.data_ptr(), flat.nbytes, flat)

    def __reduce__(self) -> _Reduced:
        if self._loan is not None:
            return type(self._loan).borrow, (self._loan,)
        return restore, (pickle.PickleBuffer(self._bytes), self._origin)


class _Memory:
    """Bytes at an address, for numpy to wrap; it keeps ``owner``, whose memory it is."""

    def __init__(self, address: int, nbytes: int, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def _array_at(address: int, nbytes: int, owner: Any) -> Any:
    return np.asarray(_Memory(address, nbytes, owner)) if nbytes else np.empty(0, np.uint8)


def _address_of(view: Any) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def map_privately(buffers: Sequence[Any]) -> list[Any]:
    """Return the buffers of one value, with a private mapping of those in the arena.

    The arena's views share a mapping that must not be written to; the private one is copy-on-write,
    and holds the same lock. Where no more can be mapped they stay as they are, and tensors are copied.
    """
    mappings: dict[int, memoryview] = {}
    return [_map_privately(memoryview(buffer), mappings) for buffer in buffers]


def _map_privately(view: memoryview, mappings: dict[int, memoryview]) -> memoryview:
    whole: Any = view.obj
    pin = getattr(whole, "pin", None)
    if pin is None or not view.nbytes:
        return view
    mapping = mappings.get(id(whole))
    if mapping is None:
        try:
            mapped = mmap.mmap(pin.fileno(), whole.nbytes, access=mmap.ACCESS_COPY)
        except OSError:
            return view
        mapping = mappings[id(whole)] = memoryview(mapped).toreadonly()
    offset = _address_of(view) - _address_of(whole)
    return mapping[offset : offset + view.nbytes]


def restore(buffer: Any, origin: str | None) -> torch.UntypedStorage:
    """Return a storage of a buffer's bytes; ``origin`` is the GPU that they came from, if any."""
    view = memoryview(buffer)
    if not view.nbytes:
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    else:
        array = _array_at(_address_of(view), view.nbytes, view)
        flat = torch.frombuffer(array, dtype=torch.uint8)
    device = None if origin is None else _device_of(origin)
    if device is not None:
        flat = flat.to(torch.device("cuda", device))
    elif not _is_private(view):
        flat = flat.clone()
    return flat.untyped_storage()


def _is_private(view: memoryview) -> bool:
    """Return whether a write to this memory changes nothing but this value.

    A writable mapping under a view that was read from the arena is copy-on-write.
    """
    return isinstance(view.obj, mmap.mmap) and not memoryview(view.obj).readonly


def rebuild(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    size: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """Return a tensor over a storage."""
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, 0, size, strides)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Set the attributes that a tensor's user gave it."""
    tensor.__dict__.update(attributes)


def choose_device(origin: str, visible: Sequence[str], current: int) -> int | None:
    """Return the index of the GPU for a tensor that comes from the GPU with UUID ``origin``.

    The same GPU where this process sees it (``visible``, in CUDA's order), else the process's
    ``current`` one, else None: the tensor stays in host memory.
    """
    if not visible:
        return None
    return visible.index(origin) if origin in visible else current


def _device_of(origin: str) -> int | None:
    # Only here, where a CUDA tensor has arrived, is CUDA initialised: never before a fork.
    count = torch.cuda.device_count()
    if not count:
        return None
    visible = [_uuid_of(index) for index in range(count)]
    return choose_device(origin, visible, torch.cuda.current_device())


def _uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
