"""A stand-in for CUDA memory that processes share: a tensor in host memory, and a file for each loan."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

from stoker.runtime.serialization import cuda_ipc
from stoker.runtime.serialization.cuda_ipc import CudaIpcMemory, Mapping

OFFSET = 64
"""Loans do not begin where their allocation begins."""


class FakeMemory(CudaIpcMemory):
    """Host memory in the part of a GPU's."""

    def can_lend(self, flat: torch.Tensor) -> bool:
        return flat.device.type == "cpu"

    def lend(self, flat: torch.Tensor) -> Mapping:
        descriptor, name = tempfile.mkstemp(dir=os.environ.get("STOKER_TEST_LENT"))
        with open(descriptor, "wb") as file:
            file.write(bytes(OFFSET))
            file.write(bytes(flat.contiguous().view(-1).view(torch.uint8).tolist()))
        return Mapping("GPU-fake", name.encode(), OFFSET)

    def read(self, mapping: Mapping, nbytes: int) -> torch.Tensor:
        with Path(mapping.handle.decode()).open("r+b") as file:
            view = mmap.mmap(file.fileno(), 0)
        return torch.frombuffer(
            view, dtype=torch.uint8, offset=mapping.offset, count=nbytes
        ).clone()


def install() -> None:
    """Have this process lend and read host memory."""
    cuda_ipc.CudaIpcMemory = FakeMemory  # type: ignore[misc]
