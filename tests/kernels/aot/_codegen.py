"""Compiles every workload to machine code for GPUs that are not here; prints what the code uses as JSON.

Run as a script by test_codegen, in a process of its own: there the kernels load compiled, not
interpreted. Triton's wheel carries ptxas and cuobjdump. Input: {workload: [90, ...]}. Output: {case: Usage},
a case being "kernel | workload dtype sizes | sm_90".
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton

from stoker_kernels import aot
from stoker_kernels.workloads import Workload, workload, workloads

HOPPER = 90
COUNTED = (
    "cross_entropy",
    "masked_softmax",
    "bias_gelu_erf",
    "dropout_add_layer_norm",
    "topk_compress",
)  # by instruction
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def cuobjdump(compiled: Any, what: str) -> str:
    """What the disassembler says of one compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions(compiled: Any) -> dict[str, int]:
    """SASS instructions: all of them, and those of the longest loop, which is a branch backwards."""
    line = r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);"
    found = re.findall(line, cuobjdump(compiled, "--dump-sass"), re.MULTILINE)
    places = [int(place, 16) for place, name, _ in found if name != "NOP"]
    longest = 0
    for place, name, operands in found:
        goal = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        if goal and int(goal[1], 16) < int(place, 16):
            inside = [at for at in places if int(goal[1], 16) <= at <= int(place, 16)]
            longest = max(longest, len(inside))
    return {"instructions": len(places), "loop_instructions": longest}


def usage(compiled: Any) -> dict[str, int]:
    """Resources and instructions of one compiled kernel."""
    ptx = compiled.asm["ptx"]
    dump = cuobjdump(compiled, "--dump-resource-usage")
    return {
        "registers": int(re.findall(r"REG:(\d+)", dump)[-1]),
        "spill_nbytes": int(re.findall(r"LOCAL:(\d+)", dump)[-1])
        + int(re.findall(r"STACK:(\d+)", dump)[-1]),
        "shared_nbytes": compiled.metadata.shared,
        "threads": compiled.metadata.num_warps * 32,
        "wgmma": ptx.count("wgmma.mma_async"),
        "wgmma_fp8": len(re.findall(r"wgmma\.mma_async[\w.]*\.f32\.e[45]m[32]\.e4m3", ptx)),
        "mma": ptx.count("mma.sync"),
        "tcgen05": ptx.count("tcgen05.mma"),
        "wide_loads": len(
            re.findall(r"ld\.global[.\w:]*\.(?:v4\.b32|v8\.b32|v4\.b64|v2\.b64)", ptx)
        )
        + len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*, 0x10", ptx)),
        # tl.exp: it rescales what would be denormal, with three instructions more.
        "slow_exponentials": len(re.findall(r"ex2\.approx\.f32", ptx)),
        "fp64": len(re.findall(r"\.f64", ptx)),
        # Of a loop's loads that run ahead: those whose number of bytes no condition can make 0.
        "certain_copies": len(
            re.findall(r"cp\.async\.c.*addrspace\(1\) [^,]+, i32 \d+[,)]", compiled.asm["llir"])
        ),
    }


def compile_all(work: Workload, archs: list[int]) -> dict[str, dict[str, int]]:
    """Every kernel of ``work`` for each arch: at its measured size for each dtype.

    Its variants for one dtype and Hopper: they differ in sizes, and compiling attention takes seconds. For
    Hopper alone also a workload that is another with other settings (``attention_gqa``).
    """
    report: dict[str, dict[str, int]] = {}
    is_setting = any(work.name.startswith(f"{other}_") for other in workloads())
    for arch in archs:
        if is_setting and arch != HOPPER:
            continue
        for dtype in work.dtypes:
            full = dtype == work.dtypes[0] and arch == HOPPER
            for variant in ({}, *(work.variants if full else ())):
                with aot.compiling(arch) as run:
                    work.call("meta", dtype, **variant)
                sizes = " ".join(f"{name}={size}" for name, size in variant.items())
                case = f"{work.name} {str(dtype).removeprefix('torch.')} {sizes}".strip()
                for name, compiled in run.kernels:
                    used = usage(compiled)
                    if not variant and arch == HOPPER and work.name in COUNTED:
                        used |= instructions(compiled)
                    report[f"{name} | {case} | sm_{arch}"] = used
    return report


if __name__ == "__main__":
    report: dict[str, dict[str, int]] = {}
    for name, archs in json.loads(sys.argv[1]).items():
        report |= compile_all(workload(name), archs)
    sys.stdout.write(json.dumps(report))
