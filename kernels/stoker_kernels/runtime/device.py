"""The facts of a device that a launcher may ask for; a dry run invents them for a GPU that is not here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Device:
    """The architecture (90 for sm_90) and the number of multiprocessors.

    ``interpreted``: the kernels run in Triton's interpreter, where small blocks make tests loop and
    half-precision arithmetic must be widened first.
    """

    arch: int
    multiprocessors: int
    interpreted: bool = False


@lru_cache
def cuda_device(index: int) -> Device:
    """Return the facts of CUDA device ``index``."""
    import torch  # not above: ``python -m stoker_kernels.aot`` loads this to say that torch is missing

    properties = torch.cuda.get_device_properties(index)
    return Device(properties.major * 10 + properties.minor, properties.multi_processor_count)
