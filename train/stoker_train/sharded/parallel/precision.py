"""Mixed precision: products in 16 bit, while parameters, their gradients and states stay in fp32.

Called by ``zero`` and by the rank's context. The parameters that the optimizer sees are the fp32 masters; a
copy in 16 bit lives only while a layer runs.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from stoker.exceptions import BadRequestError

_BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16}


def policy(precision: str | torch.dtype | MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for "bf16", "fp32" (the same as None), or a policy as it is.

    Gradients are reduced in fp32. BadRequestError for another name: fp16 would need its loss scaled.
    """
    if isinstance(precision, MixedPrecisionPolicy):
        return precision
    dtype = _BY_NAME.get(precision, precision) if isinstance(precision, str) else precision
    if dtype in (None, torch.float32):
        return MixedPrecisionPolicy()
    if dtype is torch.bfloat16:
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    raise BadRequestError(
        f"precision {precision!r} is not known\ngive one of bf16, fp32", field="precision"
    )
