"""The forward kernel for Hopper: one warp loads by TMA, two warpgroups of 64 rows multiply.

A ring of STAGES tiles of keys and of values lies in shared memory. The loader fills a slot when both
warpgroups have given it back (``*_empty``, two arrivals), and the bytes' arrival opens it (``*_full``). A
warpgroup issues the next tile's scores and this tile's product with the values together, and computes the
next softmax while the latter runs (Shah et al., "FlashAttention-3", section 3.2). Tiles go from the last to
the first, so that those with a mask come first; what lies outside the tensors is loaded as zero, and hidden
by the mask. Run by ``launchers``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name in Triton 3.6
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _start(BLOCK_M: gl.constexpr):
    """First row of this program: the longest rows of a head go first."""
    return (gl.num_programs(0) - 1 - gl.program_id(0)) * BLOCK_M


@gluon.jit
def _tiles(
    start_m, seq_q, seq_k, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Tiles of keys that the program's rows see, one at least, and how many of the last need a mask."""
    end = seq_k
    seen_by_all = seq_k
    if CAUSAL:
        end = gl.maximum(gl.minimum(seq_k, start_m + BLOCK_M + seq_k - seq_q), 1)
        seen_by_all = gl.maximum(gl.minimum(seq_k, start_m + 1 + seq_k - seq_q), 0)
    tiles = (end + BLOCK_N - 1) // BLOCK_N
    return tiles, gl.maximum(tiles - seen_by_all // BLOCK_N, 1)


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty,
    seq_q, seq_k,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The loader's warp: both halves of the rows, then keys and values from the last tile to the first."""
    start_m = _start(BLOCK_M)
    head = gl.program_id(1)
    batch = gl.program_id(2)
    for half in gl.static_range(2):
        full = q_full.index(half)
        mbarrier.expect(full, q_desc.block_type.nbytes)
        row = start_m + half * (BLOCK_M // 2)
        tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], full, q_smem.index(half))
    tiles, _ = _tiles(start_m, seq_q, seq_k, CAUSAL, BLOCK_M, BLOCK_N)
    for it in range(tiles):
        slot = it % STAGES
        given_back = ((it // STAGES) & 1) ^ 1
        at = [batch, head // GROUP, (tiles - 1 - it) * BLOCK_N, 0]
        mbarrier.wait(k_empty.index(slot), given_back)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, at, k_full.index(slot), k_smem.index(slot))
        mbarrier.wait(v_empty.index(slot), given_back)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, at, v_full.index(slot), v_smem.index(slot))


@gluon.jit
def _softmax(
    s, highest, total, row, start_n, offset, seq_k, scale_log2,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """Fold a tile's scores into the online softmax: probabilities, maximum, sum, decay of what was before."""
    if MASKED:
        column = start_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))
        seen = (column < seq_k)[None, :]
        if CAUSAL:
            seen = seen & (column[None, :] <= (row + offset)[:, None])
        s = gl.where(seen, s, -float("inf"))
    new_highest = gl.maximum(highest, gl.max(s, 1) * scale_log2)
    shift = new_highest
    if MASKED:  # a row that has seen nothing yet: -inf - -inf is no number
        shift = gl.where(new_highest == -float("inf"), 0.0, new_highest)
    # Rounded by one unit: a fused multiply-add does not round the product, which shift is rounded from.
    p = gl.minimum(gl.exp2(s * scale_log2 - shift[:, None]), 1.0)
    decay = gl.exp2(highest - shift)
    return p, new_highest, total * decay + gl.sum(p, 1), decay


@gluon.jit
def _fold(
    acc, p, highest, total, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, it, tiles, row,
    offset, seq_k, scale_log2,
    MASKED: gl.constexpr, CAUSAL: gl.constexpr, HALF: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, O: gl.constexpr,  # noqa: E741
):  # fmt: skip
    """Multiply the tile before's probabilities ``p`` by its values, and compute tile ``it``'s meanwhile."""
    slot = it % STAGES
    slot_before = (it - 1) % STAGES
    k = k_smem.index(slot).reshape([BLOCK_N, HEAD_DIM])
    v = v_smem.index(slot_before).reshape([BLOCK_N, HEAD_DIM])
    zero = gl.zeros([HALF, BLOCK_N], gl.float32, layout=S)
    mbarrier.wait(k_full.index(slot), (it // STAGES) & 1)
    scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(slot_before), ((it - 1) // STAGES) & 1)
    product = warpgroup_mma(p, v, acc, is_async=True)
    s = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(k_empty.index(slot))
    next_p, highest, total, decay = _softmax(
        s, highest, total, row, (tiles - 1 - it) * BLOCK_N, offset, seq_k, scale_log2,
        MASKED, CAUSAL, HALF, BLOCK_N, S,
    )  # fmt: skip
    next_p = gl.convert_layout(next_p.to(v_smem.dtype), gl.DotOperandLayout(0, O, 2))
    acc, p = warpgroup_mma_wait(0, [product, p])  # until here the product reads p's registers
    mbarrier.arrive(v_empty.index(slot_before))
    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, O))[:, None]
    return acc, next_p, highest, total


@gluon.jit
def _multiply(
    half: gl.constexpr, out_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full,
    v_empty, seq_q, seq_k, scale_log2,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows ``half`` * BLOCK_M / 2 and on of the program's."""
    HALF: gl.constexpr = BLOCK_M // 2
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])  # noqa: E741
    start_m = _start(BLOCK_M) + half * HALF
    tiles, masked = _tiles(_start(BLOCK_M), seq_q, seq_k, CAUSAL, BLOCK_M, BLOCK_N)
    offset = seq_k - seq_q
    row = start_m + gl.arange(0, HALF, layout=gl.SliceLayout(1, S))
    highest = gl.full([HALF], -float("inf"), gl.float32, layout=gl.SliceLayout(1, S))
    total = gl.zeros([HALF], gl.float32, layout=gl.SliceLayout(1, S))
    acc = gl.zeros([HALF, HEAD_DIM], gl.float32, layout=O)
    q = q_smem.index(half).reshape([HALF, HEAD_DIM])
    k = k_smem.index(0).reshape([BLOCK_N, HEAD_DIM])
    mbarrier.wait(q_full.index(half), 0)
    mbarrier.wait(k_full.index(0), 0)
    zero = gl.zeros([HALF, BLOCK_N], gl.float32, layout=S)
    scores = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(k_empty.index(0))
    p, highest, total, _ = _softmax(
        s, highest, total, row, (tiles - 1) * BLOCK_N, offset, seq_k, scale_log2,
        True, CAUSAL, HALF, BLOCK_N, S,
    )  # fmt: skip
    p = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, O, 2))
    for it in range(1, masked):
        acc, p, highest, total = _fold(
            acc, p, highest, total, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, it, tiles,
            row, offset, seq_k, scale_log2,
            True, CAUSAL, HALF, BLOCK_N, HEAD_DIM, STAGES, S, O,
        )  # fmt: skip
    for it in range(masked, tiles):
        acc, p, highest, total = _fold(
            acc, p, highest, total, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, it, tiles,
            row, offset, seq_k, scale_log2,
            False, CAUSAL, HALF, BLOCK_N, HEAD_DIM, STAGES, S, O,
        )  # fmt: skip
    slot = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(slot), ((tiles - 1) // STAGES) & 1)
    v = v_smem.index(slot).reshape([BLOCK_N, HEAD_DIM])
    product = warpgroup_mma(p, v, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, [product, p])

    # A row that saw nothing has total 0 and highest -inf: output 0, lse -inf.
    total = gl.where(total == 0.0, 1.0, total)
    out = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O))[:, None]
    q.store(out.to(q_smem.dtype))  # nobody reads these rows of q any more
    fence_async_shared()
    barrier()
    head = gl.program_id(1)
    batch = gl.program_id(2)
    tma.async_copy_shared_to_global(out_desc, [batch, head, start_m, 0], q_smem.index(half))
    rows = (gl.cast(batch, gl.int64) * gl.num_programs(1) + head) * seq_q
    lse = (highest + gl.log2(total)) * LN_2
    gl.store(lse_ptr + rows + row, lse, mask=row < seq_q)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["seq_q", "seq_k"])
def hopper_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, seq_q, seq_k, scale_log2,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head. lse (B, H, S_q) fp32; grid (tiles of rows, H, B)."""
    half_shape: gl.constexpr = [2, 1, 1, BLOCK_M // 2, HEAD_DIM]
    ring_shape: gl.constexpr = [STAGES, 1, 1, BLOCK_N, HEAD_DIM]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, half_shape, q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, ring_shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, ring_shape, v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_empty.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                0, out_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full,
                v_empty, seq_q, seq_k, scale_log2, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES,
            )),
            (_multiply, (
                1, out_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full,
                v_empty, seq_q, seq_k, scale_log2, CAUSAL, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES,
            )),
            (_load, (
                q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full,
                v_empty, seq_q, seq_k, CAUSAL, GROUP, BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
