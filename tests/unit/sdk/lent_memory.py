"""A stand-in for CUDA memory that processes share: a tensor in host memory, and a file for each loan."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

from stoker.runtime.serialization import cuda_ipc
from stoker.runtime.serialization.cuda_ipc import CudaIpcMemory, Mapping

_names: dict[int, str] = {}
OFFSET = 64
"""Loans do not begin where their allocation begins."""


class FakeMemory(CudaIpcMemory):
    """Host memory in the part of a GPU's."""

    def can_lend(self, flat: torch.Tensor) -> bool:
        return flat.device.type == "cpu"

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        descriptor, name = tempfile.mkstemp(dir=os.environ.get("STOKER_TEST_LENT"))
        with open(descriptor, "r+b") as file:
            file.truncate(OFFSET + nbytes)
            view = mmap.mmap(file.fileno(), 0)
        memory = torch.frombuffer(view, dtype=torch.uint8, offset=OFFSET)
        _names[memory.data_ptr()] = name
        return memory

    def lend(self, memory: torch.Tensor) -> Mapping:
        return Mapping("GPU-fake", _names[memory.data_ptr()].encode(), OFFSET)

    def erase(self, memory: torch.Tensor) -> None:
        memory.zero_()

    def read(self, mapping: Mapping, nbytes: int, more: int) -> tuple[torch.Tensor, bytes]:
        data = Path(mapping.handle.decode()).read_bytes()[mapping.offset :]
        copy = torch.frombuffer(bytearray(data[:nbytes]), dtype=torch.uint8)
        return copy, data[nbytes : nbytes + more]


def install() -> None:
    """Have this process lend and read host memory."""
    cuda_ipc.CudaIpcMemory = FakeMemory  # type: ignore[misc]
