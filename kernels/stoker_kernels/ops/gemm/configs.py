"""Tile sizes of the kernels with matrix products: the heuristic, and what an autotuner may try around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker_kernels.runtime.backend import dense_last_dim

if TYPE_CHECKING:
    import torch

    from stoker_kernels.runtime.device import Device
    from stoker_kernels.tuning import Config

HOPPER = 90
LANES = 32
TILE_ROWS = 256  # at most
ALIGNED = 16  # values: Triton knows of no smaller divisor of a stride
MOST_ACCUMULATORS = 128  # fp32 values of a thread: more would spill beside the operands


def operand(tensor: torch.Tensor) -> torch.Tensor:
    """Return (rows, inner) as a kernel can address it, itself or a copy.

    Rows are dense, and the rows of a tile within 2^31 values of each other.
    """
    tensor = dense_last_dim(tensor)
    return tensor if tensor.stride(0) * TILE_ROWS < 2**31 else tensor.contiguous()


def _config(block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int) -> Config:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def config(
    element_nbytes: int,
    device: Device,
    accumulators: int = 1,
    aligned: bool = True,
) -> Config:
    """Choose tiles that spill no register, which the code generation tests assert.

    ``accumulators`` of BLOCK_M by BLOCK_N are held at once. On Hopper a tile takes eight warps: with four,
    whose sums leave half of the registers, some epilogues spill; and where 128 are enough, two programs
    share a multiprocessor, one's epilogue beside the other's products. fp32 products run on the CUDA cores
    and need small tiles; so do operands that are not ``aligned``, whose values come one by one. The
    interpreter's tiles are unequal on purpose.
    """
    if device.interpreted:
        return _config(16, 32, 16, 4, 1)
    if element_nbytes == 4:
        return _config(32, 64 // accumulators, 32, 8, 1)
    if not aligned:
        return _config(64, 64 // accumulators, 32, 4, 2)
    if device.arch >= HOPPER:
        return _config(128, 128 // accumulators, 64, 8, 3)
    return _config(128, 128 // accumulators, 32, 8 // accumulators, 4)


def candidates(
    element_nbytes: int,
    device: Device,
    accumulators: int = 1,
    aligned: bool = True,
) -> list[Config]:
    """Return the heuristic and its neighbours that fit into shared memory and registers."""
    base = config(element_nbytes, device, accumulators, aligned)
    if element_nbytes == 4 or not aligned:
        return [{**base, "num_warps": warps} for warps in (4, 8)]
    limit = (227 if device.arch >= HOPPER else 163) * 1024
    configs = [base]
    for block_m in (64, 128):
        for block_n in (64, 128, 256):
            for block_k in (32, 64):
                for num_warps in (4, 8):
                    for num_stages in (3, 4):
                        held = accumulators * block_m * block_n // (LANES * num_warps)
                        columns = block_m + accumulators * block_n
                        nbytes = columns * block_k * element_nbytes * num_stages
                        one = _config(block_m, block_n, block_k, num_warps, num_stages)
                        if nbytes <= limit and held <= MOST_ACCUMULATORS and one != base:
                            configs.append(one)
    return configs


def fp8_config(device: Device) -> Config:
    """Choose tiles of fp8 products: a block of scales along the inner dimension, and two accumulators.

    One holds a block's sum, the other all of them, so eight warps share a tile.
    """
    if device.interpreted:
        return _config(16, 32, 128, 4, 1)
    return _config(128, 128, 128, 8, 4 if device.arch >= HOPPER else 2)


def fp8_candidates(device: Device) -> list[Config]:
    """Return the heuristic and its neighbours; no tile is wider than a block of scales."""
    base = fp8_config(device)
    return [
        {**base, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_stages": stages}
        for block_m in (64, 128)
        for block_n in (64, 128)
        for stages in (2, 3, 4)
        if stages <= base["num_stages"]
    ]
