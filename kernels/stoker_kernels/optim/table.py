"""The table that tells one launch about all tensors: addresses, sizes, and which program does what.

It is built on the CPU and copied to the device once; it is found again as long as the tensors' addresses
and sizes stay, so steps after the first build nothing. It holds numbers, no tensors: nobody's memory is
kept alive by it.

Within a capture for a CUDA graph the table is copied from pinned memory by a node of the graph itself:
gradients allocated during the capture have addresses that no earlier step saw. The pinned memory is never
freed, for the graph reads it at every replay; an eager step sets it aside, so take one before a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

POINTERS = 5  # parameter, gradient, two states, step; 0 where there is none
COLUMNS = 8  # then: number of elements, index of the first block, place among all parameters
VECTOR = 8  # elements: 16 bytes of bf16, 32 of fp32
CACHED_TABLES = 64
RESERVED_TABLES = 256

# Pinned memory for tables to come, by size, parameters and kind: a capture may allocate none.
_reserved: dict[tuple[int, tuple[int, ...], bool], torch.Tensor] = {}
_read_by_graphs: list[torch.Tensor] = []


class Part(NamedTuple):
    """Consecutive blocks of one launch: those of tensors that allow 16-byte accesses, or the others."""

    aligned: bool
    first: int
    blocks: int


class Table(NamedTuple):
    """A table on its device."""

    rows: torch.Tensor  # (T, COLUMNS) int64, in the order of the tensors
    tensor_of_block: torch.Tensor  # (blocks,) int32
    parts: tuple[Part, ...]
    blocks: int


def table_of(
    columns: Sequence[list[torch.Tensor]], chunk: int, places: Sequence[int] | None = None
) -> Table:
    """Return the table for tensors given by kind (``POINTERS`` lists, empty where a kind is missing).

    A block is ``chunk`` elements of one tensor. All tensors are on one device; the first list that is
    not empty tells the sizes. ``places`` number the tensors for the random bits of their rounding.
    """
    leading = next(column for column in columns if column)
    addresses = tuple(tuple(t.data_ptr() for t in column) for column in columns)
    numels = tuple(t.numel() for t in leading)
    places = tuple(range(len(numels)) if places is None else places)
    device = leading[0].device
    if device.type != "cuda":
        return _cached(addresses, numels, places, chunk, device, 0)
    size = host_size(numels, chunk)
    # A step has several tables of one size: that of the norms, and those of equal groups.
    place = (size, addresses[0], bool(addresses[-1]))
    if torch.cuda.is_current_stream_capturing():
        host = _reserved.pop(place) if place in _reserved else _pinned(size)
        _read_by_graphs.append(host)
        return _build(addresses, numels, places, chunk, device, host)
    if place not in _reserved:
        if len(_reserved) >= RESERVED_TABLES:  # the oldest: its parameters may be gone
            del _reserved[next(iter(_reserved))]
        _reserved[place] = _pinned(size)
    # Another stream would not wait for this one's copy.
    stream = torch.cuda.current_stream(device).cuda_stream
    return _cached(addresses, numels, places, chunk, device, stream)


@lru_cache(maxsize=CACHED_TABLES)
def _cached(
    addresses: tuple[tuple[int, ...], ...],
    numels: tuple[int, ...],
    places: tuple[int, ...],
    chunk: int,
    device: torch.device,
    stream: int,
) -> Table:
    host = torch.zeros(host_size(numels, chunk), dtype=torch.int64)
    return _build(addresses, numels, places, chunk, device, host)


def _pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int64, pin_memory=True)


def _build(
    addresses: tuple[tuple[int, ...], ...],
    numels: tuple[int, ...],
    places: tuple[int, ...],
    chunk: int,
    device: torch.device,
    host: torch.Tensor,
) -> Table:
    """Write the table into ``host`` and copy it to ``device``: the rows, then the blocks' tensors."""
    count = len(numels)
    blocks = [-(-n // chunk) for n in numels]
    aligned = [
        numels[i] % VECTOR == 0 and all(a[i] % 16 == 0 for a in addresses[:-1] if a)
        for i in range(count)
    ]
    order = sorted(range(count), key=lambda i: not aligned[i])
    starts = [0, *accumulate(blocks[i] for i in order)]
    first = dict(zip(order, starts, strict=False))
    total = starts[-1]
    split = sum(blocks[i] for i in order if aligned[i])
    host[: count * COLUMNS] = torch.tensor(
        [
            [*(a[i] if a else 0 for a in addresses), numels[i], first[i], places[i]]
            for i in range(count)
        ],
        dtype=torch.int64,
    ).flatten()  # fmt: skip
    host[count * COLUMNS :].view(torch.int32)[:total] = torch.repeat_interleave(
        torch.tensor(order, dtype=torch.int32), torch.tensor([blocks[i] for i in order])
    )
    # Pageable memory is staged before this returns, so no wait for the device either way.
    buffer = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
    parts = (Part(True, 0, split), Part(False, split, total - split))
    return Table(
        buffer[: count * COLUMNS].view(count, COLUMNS),
        buffer[count * COLUMNS :].view(torch.int32)[:total],
        tuple(part for part in parts if part.blocks),
        total,
    )


def host_size(numels: Sequence[int], chunk: int) -> int:
    """Return the int64 numbers of the table: the rows, then two blocks' tensors to a number."""
    blocks = sum(-(-n // chunk) for n in numels)
    return len(numels) * COLUMNS + -(-blocks // 2)


def lies_as(tensor: torch.Tensor, param: torch.Tensor) -> bool:
    """Return whether ``tensor`` has each element where the dense ``param`` has it, on the same device."""
    if tensor.get_device() != param.get_device():
        return False
    if tensor.is_contiguous() and param.is_contiguous():
        return tensor.numel() == param.numel()
    return tensor.shape == param.shape and tensor.stride() == param.stride()


def laid_out(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` itself where it lies as ``param``, else a copy that does: updates walk memory."""
    return grad if lies_as(grad, param) else torch.empty_like(param, dtype=grad.dtype).copy_(grad)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
