"""Memory that another process maps: what is in it, and that nothing of it stays."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys

import pytest
import torch

from stoker_train.elastic.state.memory import Mapped, Place, allocate

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="no anonymous files in memory on this system"
)

READER = """
import sys, torch
from stoker_train.elastic.state.memory import Mapped, Place
pid, fd, inode, file_nbytes, offset = map(int, sys.argv[1:6])
place = Place(pid, fd, inode, file_nbytes, offset, sys.argv[6])
print(Mapped().tensor(place, torch.float64, (2, 3)).sum().item())
"""


def test_another_process_reads_what_is_there_now() -> None:
    wanted = [torch.ones(3, dtype=torch.bool), torch.arange(6, dtype=torch.float64).view(2, 3)]
    flags, numbers = allocate(wanted)
    numbers.tensor.copy_(wanted[1] + 1)
    place = numbers.place
    assert place is not None
    assert flags.tensor.dtype == torch.bool
    given = [*dataclasses.astuple(place)]
    done = subprocess.run(
        [sys.executable, "-c", READER, *map(str, given)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "21.0", done.stderr


def test_a_place_that_is_gone_is_an_error_and_no_other_file() -> None:
    (buffer,) = allocate([torch.ones(4)])
    place = buffer.place
    assert place is not None
    read = Mapped().tensor(place, torch.float32, (4,))
    read_fds = len(os.listdir("/proc/self/fd"))
    del buffer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < read_fds
    assert read.shape == (4,)  # what is mapped stays mapped
    with pytest.raises(OSError):
        Mapped().tensor(place, torch.float32, (4,))
    other = Place(os.getpid(), 1, place.inode, place.file_nbytes, 0)
    with pytest.raises(OSError):
        Mapped().tensor(other, torch.float32, (4,))


def test_each_tensor_has_a_storage_of_its_own() -> None:
    buffers = allocate([torch.ones(1000), torch.ones(3), torch.ones(0, 2), torch.ones(())])
    assert [one.tensor.untyped_storage().nbytes() for one in buffers] == [4000, 12, 0, 4]
    assert buffers[2].place is None
