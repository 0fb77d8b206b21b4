"""Random numbers of a rank in a tensor group: its own where it has other values, all ranks' where not.

All ranks of a group begin with one seed, so that what each of them computes alike is dropped alike. Called by
``our_models``, around what each rank has a part of.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker_train.sharded.parallel.tensor.exchange import TensorGroup

_SEED_BITS = 62
_STRIDE = 0x9E3779B97F4A7C15 >> 3
"""Between the seeds of ranks: odd, and so large that small differences of seeds do not meet it."""


@contextmanager
def own_random(group: TensorGroup, device: torch.device) -> Iterator[None]:
    """Draw numbers that differ from rank to rank; afterwards all ranks draw alike again, as before."""
    drawn = int(torch.randint(1 << _SEED_BITS, ()))
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=_type(device)):
        torch.manual_seed((drawn + group.rank * _STRIDE) % (1 << _SEED_BITS))
        yield


def own_seed(seed: torch.Tensor | None, group: TensorGroup) -> torch.Tensor | None:
    """Return a kernel's seed (1,) int64 that differs from rank to rank."""
    return None if seed is None else seed + group.rank * _STRIDE


def _type(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type
