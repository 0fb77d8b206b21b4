"""A state as a skeleton and a list of tensors: what commits copy, checkpoints write, syncs send.

States are what ``state_dict()`` returns: dicts, lists and tuples of tensors, numbers and texts. Anything
else in them is pickled at once, so that it cannot change afterwards. Nothing here copies a tensor.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch

from stoker.runtime.serialization.pickling import pack

__all__ = (
    "FlatState",
    "Pickled",
    "TensorSlot",
    "flatten",
    "from_portable",
    "to_portable",
    "unflatten",
)

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_PICKLE, _BYTES = "__pickle__", "__bytes__"


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The place of tensor number ``index`` in a skeleton."""

    index: int


@dataclass(frozen=True, slots=True)
class Pickled:
    """An object in a skeleton that is neither a container nor plain, as its pickle."""

    data: bytes


@dataclass(slots=True)
class FlatState:
    """A state without its tensors, its tensors, and the path of each by which errors name it.

    Tensors that are one in memory, as tied weights are, are one here.
    """

    skeleton: Any
    tensors: list[torch.Tensor] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def flatten(state: Any, name: str = "") -> FlatState:
    """Take a state apart; its tensors are those of ``state``, detached. ``name`` begins all paths.

    SerializationError, by its path, for what cannot be pickled.
    """
    flat = FlatState(None)
    flat.skeleton = _Flattener(flat).take(state, name)
    return flat


def unflatten(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Put a state together again, of new containers and the given tensors."""
    kind = type(skeleton)
    if kind is dict:
        return {key: unflatten(value, tensors) for key, value in skeleton.items()}
    if kind is list or kind is tuple:
        return kind([unflatten(value, tensors) for value in skeleton])
    if kind is TensorSlot:
        return tensors[skeleton.index]
    if kind is Pickled:
        return pickle.loads(skeleton.data)
    return skeleton


def to_portable(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Do as :func:`unflatten`, but leave pickles as bytes, for ``torch.load(weights_only=True)``."""
    kind = type(skeleton)
    if kind is dict:
        return {key: to_portable(value, tensors) for key, value in skeleton.items()}
    if kind is list or kind is tuple:
        return kind([to_portable(value, tensors) for value in skeleton])
    if kind is TensorSlot:
        return tensors[skeleton.index]
    if kind is Pickled or kind is bytes:
        data = skeleton.data if kind is Pickled else skeleton
        # Bytes in a tensor: as themselves they would be twice as long there.
        held = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        return {_PICKLE if kind is Pickled else _BYTES: held}
    return skeleton


def from_portable(value: Any) -> Any:
    """Return the state that :func:`to_portable` made portable; its tensors are those of ``value``."""
    kind = type(value)
    if kind is dict:
        if len(value) == 1:
            if (held := value.get(_PICKLE)) is not None:
                return pickle.loads(held.numpy().tobytes())
            if (held := value.get(_BYTES)) is not None:
                return bytes(held.numpy().tobytes())
        return {key: from_portable(one) for key, one in value.items()}
    if kind is list or kind is tuple:
        return kind([from_portable(one) for one in value])
    return value


class _Flattener:
    def __init__(self, flat: FlatState) -> None:
        self._flat = flat
        self._seen: dict[tuple[Any, ...], int] = {}

    def take(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, _ATOMS):
            return value if type(value) in _ATOMS else self._pickled(value, path)
        kind = type(value)
        if kind in _TENSORS and value.layout is torch.strided and not value.is_quantized:
            return self._tensor(value.detach(), path)
        if isinstance(value, dict) and all(type(key) in _ATOMS for key in value):
            if kind is dict or kind is OrderedDict:
                inner = f"{path}." if path else ""
                return {key: self.take(one, f"{inner}{key}") for key, one in value.items()}
        elif kind is list or kind is tuple:
            return kind([self.take(one, f"{path}[{n}]") for n, one in enumerate(value)])
        return self._pickled(value, path)

    def _tensor(self, tensor: torch.Tensor, path: str) -> TensorSlot:
        key = (
            tensor.data_ptr(),
            tensor.dtype,
            tensor.device,
            tuple(tensor.shape),
            tensor.stride(),
        )
        index = self._seen.get(key) if tensor.numel() else None
        if index is None:
            index = self._seen[key] = len(self._flat.tensors)
            self._flat.tensors.append(tensor)
            self._flat.paths.append(path)
        return TensorSlot(index)

    def _pickled(self, value: Any, path: str) -> Pickled:
        for dumps in (pickle.dumps, cloudpickle.dumps):
            try:
                return Pickled(dumps(value, protocol=5))
            except Exception:
                continue
        packed = pack(value, what=path)  # raises, and names the member at fault
        return Pickled(pickle.dumps((packed.data, packed.buffers)))
