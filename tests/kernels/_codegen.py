"""Compiles every kernel to machine code for GPUs that are not here; prints what the code uses as JSON.

Run as a script by test_codegen, in a process of its own: there the kernels load compiled, not
interpreted. Triton's wheel carries ptxas and cuobjdump. Output: {case: {registers, spill_nbytes,
shared_nbytes, wgmma, mma, wide_loads, fp64}}.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stoker_kernels.ops.adamw import triton as adamw
from stoker_kernels.ops.attention import kernels as attention
from stoker_kernels.ops.attention import triton as attention_launch
from stoker_kernels.ops.cross_entropy import triton as cross_entropy
from stoker_kernels.ops.rms_norm import triton as rms_norm

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
HEADS = [(dtype, dim) for dtype in (torch.bfloat16, torch.float32) for dim in (32, 64, 128)]
NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


def signature(kernel: Any, storage: str, constants: dict[str, Any]) -> dict[str, str]:
    """Argument types by the naming habits of our kernels."""
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in ("target_ptr", "table_ptr", "tensor_of_block_ptr"):
            types[name] = "*i64"
        elif name in (
            "rstd_ptr", "lse_ptr", "delta_ptr", "loss_ptr", "dloss_ptr", "dw_partial_ptr", "square_sum_ptr"
        ):  # fmt: skip
            types[name] = "*fp32"
        elif name.endswith("_ptr"):
            types[name] = storage
        elif name.startswith("stride") or name in (
            "rows", "columns", "vocab", "heads", "seq_len", "ignore_index"
        ):  # fmt: skip
            types[name] = "i32"
        else:
            types[name] = "fp32"
    return types


def usage(
    kernel: Any,
    storage: str,
    arch: int,
    constants: dict[str, Any],
    num_warps: int,
    num_stages: int = 3,
) -> dict[str, int]:
    """Compile one specialisation: pointers and strides divisible by 16, as torch allocates."""
    types = signature(kernel, storage, constants)
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types[name].startswith("*") or name.startswith("stride") or name in ("columns", "vocab")
    }
    compiled = triton.compile(
        ASTSource(kernel, types, constants, aligned),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.findall(r"REG:(\d+)", dump)[-1]),
        "spill_nbytes": int(re.findall(r"LOCAL:(\d+)", dump)[-1])
        + int(re.findall(r"STACK:(\d+)", dump)[-1]),
        "shared_nbytes": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "wide_loads": len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", ptx)),
        "fp64": len(re.findall(r"\.f64", ptx)),
    }


def main(archs: list[int]) -> dict[str, dict[str, int]]:
    report: dict[str, dict[str, int]] = {}
    for arch in archs:
        for dtype, head_dim in HEADS:
            tiles = attention_launch.tiles(head_dim, dtype.itemsize, arch)
            for name, tile in zip(("fwd", "bwd_dq", "bwd_dkv"), tiles, strict=True):
                constants = {
                    "BLOCK_M": tile.block_m,
                    "BLOCK_N": tile.block_n,
                    "HEAD_DIM": head_dim,
                    "UPCAST": dtype == torch.float32,
                }
                report[f"attention_{name} d{head_dim} {NAMES[dtype][1:]} sm_{arch}"] = usage(
                    getattr(attention, f"attention_{name}_kernel"),
                    NAMES[dtype], arch, constants, tile.num_warps, tile.num_stages,
                )  # fmt: skip
        for columns in (1024, 8192):
            block_m, block_n, warps = rms_norm.tile(columns)
            for name in ("fwd", "bwd"):
                report[f"rms_norm_{name} n{columns} bf16 sm_{arch}"] = usage(
                    getattr(rms_norm, f"rms_norm_{name}_kernel"),
                    "*bf16", arch, {"BLOCK_M": block_m, "BLOCK_N": block_n}, warps,
                )  # fmt: skip
        block = cross_entropy.block_size(50304, interpreted=False)
        for name in ("fwd", "bwd"):
            report[f"cross_entropy_{name} bf16 sm_{arch}"] = usage(
                getattr(cross_entropy, f"cross_entropy_{name}_kernel"),
                "*bf16", arch, {"BLOCK": block}, 8,
            )  # fmt: skip
        constants = {
            "P_TYPE": adamw.tl.float32,
            "G_TYPE": adamw.tl.float32,
            "M_TYPE": adamw.tl.float32,
            "ALIGNED": True,
            "BLOCK": adamw.BLOCK,
        }
        report[f"adamw fp32 sm_{arch}"] = usage(adamw.adamw_kernel, "*fp32", arch, constants, 8)
    return report


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main([int(arch) for arch in sys.argv[1:]])))
