"""``ray.util.accelerators``: names for ``accelerator_type``, as nodes have them in their label."""

from __future__ import annotations

from typing import Any

from stoker.ray.mapping.lacking import attribute_error

NVIDIA_TESLA_V100 = "V100"
NVIDIA_TESLA_P100 = "P100"
NVIDIA_TESLA_T4 = "T4"
NVIDIA_TESLA_P4 = "P4"
NVIDIA_TESLA_K80 = "K80"
NVIDIA_TESLA_A10G = "A10G"
NVIDIA_L4 = "L4"
NVIDIA_L40S = "L40S"
NVIDIA_A100 = "A100"
NVIDIA_H100 = "H100"
NVIDIA_H200 = "H200"
NVIDIA_B200 = "B200"
NVIDIA_A100_40G = "A100-40G"
NVIDIA_A100_80G = "A100-80G"


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
