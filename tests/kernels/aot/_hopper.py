"""Compiles Hopper's attention for sm_90 and prints what its code is made of, as JSON.

Run as a script by test_hopper_attention, in a process of its own, with ``STOKER_KERNELS_HOPPER=1``. Goes the
way that a call goes, through the public function. Output: {"kernel | head_dim causal": usage}.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from _codegen import cuobjdump, usage

from stoker_kernels import aot, flash_attention


def code(compiled: Any) -> dict[str, int]:
    """Resources of one kernel; waits in PTX, and in the machine code, where ptxas adds them if it has to."""
    ptx, sass = compiled.asm["ptx"], cuobjdump(compiled, "--dump-sass")
    loads = r"cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global"
    return usage(compiled) | {
        "tma_loads": len(re.findall(loads, ptx)),
        "tma_stores": len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared", ptx)),
        "register_moves": len(re.findall(r"setmaxnreg\.(?:inc|dec)", ptx)),
        "waits": len(re.findall(r"wgmma\.wait_group", ptx)),
        "waits_in_code": len(re.findall(r"WARPGROUP\.DEPBAR", sass)),
        "loops_with_outstanding": _loops_with_outstanding(sass),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", sass)),
    }


def _loops_with_outstanding(sass: str) -> int:
    """Count innermost loops with products and a wait that leaves one of them outstanding."""
    line = r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);"
    found = [(int(a, 16), b, c) for a, b, c in re.findall(line, sass, re.MULTILINE)]
    loops = []
    for place, name, operands in found:
        goal = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        if goal and int(goal[1], 16) < place:
            loops.append((int(goal[1], 16), place))
    with_wait = 0
    for start, end in loops:
        inside = [(name, operands) for place, name, operands in found if start <= place <= end]
        nested = any(start <= a and b <= end and (a, b) != (start, end) for a, b in loops)
        outstanding = any(n == "WARPGROUP.DEPBAR.LE" and o.endswith("0x1 ") for n, o in inside)
        with_wait += outstanding and any(n.startswith("HGMMA") for n, _ in inside) and not nested
    return with_wait


def main() -> None:
    report = {}
    for head_dim, causal, group in ((128, True, 4), (64, False, 1)):
        shapes = [(1, heads, 1000, head_dim) for heads in (4, 4 // group, 4 // group)]
        q, k, v = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta").requires_grad_()
            for shape in shapes
        )
        with aot.compiling(90) as run:
            out = flash_attention(q, k, v, causal=causal)
            out.backward(torch.empty_like(out))
        for name, compiled in run.kernels:
            report[f"{name} | {head_dim} {causal}"] = code(compiled)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
