"""Tile sizes of the attention kernels: the heuristic, and what an autotuner may try around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_kernels.runtime.device import Device
    from stoker_kernels.tuning import Config

HOPPER = 90


def _config(block_m: int, block_n: int, num_warps: int, num_stages: int) -> Config:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _forward(head_dim: int, arch: int, dropout: bool) -> Config:
    """Keep rows in registers while keys stream: 64 rows to a group of four warps on Hopper."""
    if arch >= HOPPER and not dropout and head_dim >= 64:
        return _config(64, 64, 4, 3)
    if head_dim == 128 and arch < HOPPER:
        return _config(128, 32, 8, 3)
    return _config(128, 64, 8 if head_dim == 128 or dropout else 4, 3)


def _dq(head_dim: int, arch: int, dropout: bool) -> Config:
    if arch >= HOPPER and not dropout and head_dim >= 64:
        return _config(64, 32 if head_dim == 128 else 64, 4, 3)
    if arch >= HOPPER:
        return _config(128, 32 if dropout and head_dim == 128 else 64, 8, 2)
    if dropout:
        return _config(64 if head_dim == 128 else 128, 32, 8, 2)
    return _config(128, 32 if head_dim == 128 else 64, 8, 2)


def _dkv(head_dim: int, arch: int, dropout: bool) -> Config:
    """Hold two accumulators [N, D]: 128 keys take half of all registers at D = 128."""
    if arch >= HOPPER and not dropout and head_dim >= 64:
        return _config(32, 64, 4, 4) if head_dim == 128 else _config(64, 64, 4, 2)
    if arch < HOPPER and (dropout or head_dim == 128):
        return _config(32, 64, 8, 2)
    return _config(64, 128, 8, 2)


def _wide(kernel: str, element_nbytes: int, arch: int, busy: bool) -> Config:
    """Choose for tiles of 256 values, where the accumulators alone take half of all registers.

    ``busy`` says that dropout or a shape of the scores takes registers too. Hopper's matrix units want 64
    rows, which is keys for dK and dV: busy, those would spill, and 32 go to the older instruction.
    """
    if element_nbytes == 4:
        return _config(16, 16, 8, 1)
    if kernel == "attention_bwd_dkv":
        return _config(16, 64, 8, 2) if arch >= HOPPER and not busy else _config(32, 32, 8, 2)
    if kernel == "attention_bwd_dq" and busy:
        return _config(64, 16, 8, 2) if arch >= HOPPER else _config(32, 32, 8, 2)
    return _config(64, 32, 8, 2)


_HEURISTICS = {"attention_fwd": _forward, "attention_bwd_dq": _dq, "attention_bwd_dkv": _dkv}


def config(
    kernel: str,
    head_dim: int,
    element_nbytes: int,
    device: Device,
    dropout: bool,
    scored: bool = False,
) -> Config:
    """Choose tiles so that no kernel spills a register, which the code generation tests assert.

    ``head_dim`` is the tile's, padded; ``scored`` says that a window, a cap or ALiBi shapes the scores.

    Hopper's tiles without dropout, D = 64 and 128, are of the fastest measured on an H200
    that spill nothing (docs/perf/kernels.md); the others follow from registers and shared memory.
    fp32 products run on the CUDA cores and need small tiles for that. The interpreter's tiles are
    unequal on purpose.
    """
    keys_own = kernel == "attention_bwd_dkv"  # the program holds keys, and queries stream
    if device.interpreted:
        return _config(16, 32, 4, 1) if keys_own else _config(32, 16, 4, 1)
    if head_dim > 128:
        return _wide(kernel, element_nbytes, device.arch, dropout or scored)
    if element_nbytes == 4 and keys_own:
        return _config(16, 32, 8, 1)
    if element_nbytes == 4 and head_dim == 128:
        return _config(32 if kernel == "attention_fwd" else 16, 16, 8, 1)
    if element_nbytes == 4:
        return _config(32, 32, 8, 1)
    if scored and keys_own:
        return _config(32, 64, 8, 2)
    return _HEURISTICS[kernel](head_dim, device.arch, dropout or scored)


def candidates(
    kernel: str,
    head_dim: int,
    element_nbytes: int,
    device: Device,
    dropout: bool,
    scored: bool = False,
) -> list[Config]:
    """Return the heuristic and its neighbours that fit into shared memory."""
    base = config(kernel, head_dim, element_nbytes, device, dropout, scored)
    if element_nbytes == 4:
        return [{**base, "num_warps": warps} for warps in (4, 8)]
    limit = (227 if device.arch >= HOPPER else 163) * 1024
    configs = [base]
    for held in (64, 128):
        for streamed in (32, 64, 128):
            for num_warps in (4, 8):
                for num_stages in (2, 3, 4):
                    block_m, block_n = held, streamed
                    if kernel == "attention_bwd_dkv":
                        block_m, block_n = streamed, held
                    nbytes = 2 * head_dim * (2 * held + 2 * streamed * num_stages)
                    values = held * streamed // (32 * num_warps)  # scores per thread
                    one = _config(block_m, block_n, num_warps, num_stages)
                    if nbytes <= limit and 16 <= values <= 64 and one != base:
                        configs.append(one)
    return configs
