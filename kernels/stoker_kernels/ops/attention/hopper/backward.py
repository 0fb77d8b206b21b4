"""The backward kernel for Hopper: dQ, dK and dV by five products, the same bits each time.

One program holds BLOCK_N keys of a key head and goes through the queries that see them, for every query head
of the group: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K. dK and dV stay in
registers. dQ is summed in fp32 in global memory, by one program at a time: ``turns`` counts, for each tile of
queries, the programs that have added theirs, from the last tile of keys to the first. Who adds is
always next in the same order, so the sum has the same bits. It cannot deadlock: programs take their work by a
ticket, in that order, so whoever is waited for has begun.

Two warpgroups multiply, one warp loads by TMA, one takes turns: it waits for a turn while the products
run. Run by ``launchers``, after ``statistics``.
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


@gluon.jit
def _work(
    ticket, seq_q, seq_k, kv_heads,
    CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """A ticket's batch, key head, first key; first tile of queries, first without mask, how many."""
    n_tiles = (seq_k + BLOCK_N - 1) // BLOCK_N
    m_tiles = (seq_q + BLOCK_M - 1) // BLOCK_M
    place = ticket // n_tiles
    start_n = (n_tiles - 1 - ticket % n_tiles) * BLOCK_N
    first = 0
    whole = 0
    if CAUSAL:
        diagonal = start_n - (seq_k - seq_q)  # the first row that sees start_n
        first = gl.maximum(diagonal, 0) // BLOCK_M
        whole = gl.maximum(diagonal + BLOCK_N + BLOCK_M - 2, 0) // BLOCK_M
        whole = gl.minimum(whole, m_tiles)
    return place // kv_heads, place % kv_heads, start_n, first, whole, m_tiles


@gluon.jit
def _load(
    q_desc, k_desc, v_desc, dout_desc, stats_desc, dk_desc, dv_desc, ticket, held, ring, q_full,
    dout_full, empty, kv_full, summed, seq_q, seq_k, kv_heads, all_rows,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The loader's warp: keys and values, then queries, gradients and statistics; it stores dk and dv."""
    k_smem, v_smem = held
    q_smem, dout_smem, lse_smem, delta_smem = ring
    batch, kv_head, start_n, first, _, m_tiles = _work(
        ticket, seq_q, seq_k, kv_heads, CAUSAL, BLOCK_M, BLOCK_N
    )
    mbarrier.expect(kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, start_n, 0], kv_full, k_smem)
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, start_n, 0], kv_full, v_smem)
    it = 0
    for member in range(GROUP):
        head = kv_head * GROUP + member
        tiles_before = (batch * kv_heads * GROUP + head) * m_tiles
        for m in range(first, m_tiles):
            slot = it % STAGES
            at = [batch, head, m * BLOCK_M, 0]
            row = (tiles_before + m) * BLOCK_M
            full = q_full.index(slot)
            mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(full, q_desc.block_type.nbytes + stats_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, at, full, q_smem.index(slot))
            tma.async_copy_global_to_shared(stats_desc, [row], full, lse_smem.index(slot))
            full = dout_full.index(slot)
            mbarrier.expect(full, dout_desc.block_type.nbytes + stats_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(dout_desc, at, full, dout_smem.index(slot))
            tma.async_copy_global_to_shared(
                stats_desc, [all_rows + row], full, delta_smem.index(slot)
            )
            it += 1
    mbarrier.wait(summed, 0)
    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, start_n, 0], k_smem)
    tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, start_n, 0], v_smem)
    tma.store_wait(0)


@gluon.jit
def _take_turns(
    turns_ptr, ticket, mine, added, seq_q, seq_k, kv_heads,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The warp that waits for this program's turn at each tile of queries, and passes it on."""
    batch, kv_head, start_n, first, _, m_tiles = _work(
        ticket, seq_q, seq_k, kv_heads, CAUSAL, BLOCK_M, BLOCK_N
    )
    it = 0
    for member in range(GROUP):
        tiles_before = (batch * kv_heads * GROUP + kv_head * GROUP + member) * m_tiles
        for m in range(first, m_tiles):
            last = seq_k - 1  # column that the tile's rows see
            if CAUSAL:
                last = gl.minimum(last, m * BLOCK_M + BLOCK_M - 1 + seq_k - seq_q)
            turn = last // BLOCK_N - start_n // BLOCK_N
            turn_ptr = turns_ptr + tiles_before + m
            while gl.atomic_add(turn_ptr, 0, sem="acquire") != turn:
                pass
            mbarrier.arrive(mine)
            mbarrier.wait(added, it & 1)
            gl.atomic_xchg(turn_ptr, turn + 1, sem="release")
            it += 1


@gluon.jit
def _step(
    dk, dv, it, shift, held, ring, ds_smem, q_full, dout_full, empty, mine, added, sums, scale_log2,
    MASKED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, S: gl.constexpr, KV: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    """Add one tile of queries to dk and dv [N, D], and its part of dq to ``sums`` [M, D], unscaled.

    MASKED: of this tile, row i sees the columns up to i + ``shift``.
    """
    k_smem, v_smem = held
    q_smem, dout_smem, lse_smem, delta_smem = ring
    slot = it % STAGES
    phase = (it // STAGES) & 1
    k = k_smem.reshape([BLOCK_N, HEAD_DIM])
    v = v_smem.reshape([BLOCK_N, HEAD_DIM])
    q = q_smem.index(slot).reshape([BLOCK_M, HEAD_DIM])
    dout = dout_smem.index(slot).reshape([BLOCK_M, HEAD_DIM])
    zero = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=S)
    mbarrier.wait(q_full.index(slot), phase)
    scores = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(dout_full.index(slot), phase)
    dp_product = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [scores])
    lse = lse_smem.index(slot).load(gl.SliceLayout(0, S))
    # A large score is rounded differently than in the forward kernel: no probability is above 1.
    p = gl.exp2(gl.minimum(s * scale_log2 - lse[None, :], 0.0))  # [N, M]
    if MASKED:
        row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S))
        column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, S))
        p = gl.where(column[:, None] <= (row + shift)[None, :], p, 0.0)
    p_operand = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, KV, 2))
    dv_product = warpgroup_mma(p_operand, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp_product])
    delta = delta_smem.index(slot).load(gl.SliceLayout(0, S))
    ds = (p * (dp - delta[None, :])).to(q_smem.dtype)
    ds_smem.store(ds)
    fence_async_shared()
    barrier()  # dq takes what both warpgroups have stored
    ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, KV, 2))
    dk_product = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dq_zero = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, layout=DQ)
    dq_product = warpgroup_mma(ds_smem.permute((1, 0)), k, dq_zero, use_acc=False, is_async=True)
    # Until here the products read the operands' registers.
    dv, dk, p_operand, ds_operand = warpgroup_mma_wait(
        1, [dv_product, dk_product, p_operand, ds_operand]
    )
    mbarrier.arrive(empty.index(slot))
    dq = warpgroup_mma_wait(0, [dq_product])
    mbarrier.wait(mine, it & 1)
    row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, DQ))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, DQ))
    gl.atomic_add(sums + row[:, None] * HEAD_DIM + column[None, :], dq, sem="relaxed")
    mbarrier.arrive(added)
    return dk, dv


@gluon.jit
def _multiply(
    sums_ptr, ticket, held, ring, ds_smem, q_full, dout_full, empty, kv_full, mine, added, summed,
    seq_q, seq_k, kv_heads, scale, scale_log2,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Both warpgroups: 64 keys each, and half of dq's columns each."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    KV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEAD_DIM, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEAD_DIM // 2, 16])
    k_smem, v_smem = held
    batch, kv_head, start_n, first, whole, m_tiles = _work(
        ticket, seq_q, seq_k, kv_heads, CAUSAL, BLOCK_M, BLOCK_N
    )
    offset = seq_k - seq_q - start_n
    dk = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, layout=KV)
    dv = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, layout=KV)
    it = 0
    mbarrier.wait(kv_full, 0)
    tiles_before = (batch * kv_heads * GROUP + kv_head * GROUP) * m_tiles + first
    sums = sums_ptr + gl.cast(tiles_before, gl.int64) * (BLOCK_M * HEAD_DIM)
    for _ in range(GROUP):
        if CAUSAL:
            for m in range(first, whole):
                dk, dv = _step(
                    dk, dv, it, m * BLOCK_M + offset, held, ring, ds_smem, q_full, dout_full,
                    empty, mine, added, sums, scale_log2,
                    True, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES, S, KV, DQ,
                )  # fmt: skip
                sums += BLOCK_M * HEAD_DIM
                it += 1
        for _ in range(whole, m_tiles):
            dk, dv = _step(
                dk, dv, it, 0, held, ring, ds_smem, q_full, dout_full, empty, mine, added, sums,
                scale_log2, False, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES, S, KV, DQ,
            )  # fmt: skip
            sums += BLOCK_M * HEAD_DIM
            it += 1
        sums += first * (BLOCK_M * HEAD_DIM)  # the next head's tiles that see none of these keys
    barrier()  # both have read all of the keys
    k_smem.reshape([BLOCK_N, HEAD_DIM]).store((dk * scale).to(k_smem.dtype))
    v_smem.reshape([BLOCK_N, HEAD_DIM]).store(dv.to(v_smem.dtype))
    fence_async_shared()
    mbarrier.arrive(summed)


@gluon.jit(do_not_specialize=["seq_q", "seq_k", "all_rows"])
def hopper_bwd_kernel(
    q_desc, k_desc, v_desc, dout_desc, stats_desc, dk_desc, dv_desc, sums_ptr, turns_ptr,
    ticket_ptr, seq_q, seq_k, kv_heads, all_rows, scale, scale_log2,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one key head; as many programs as there are such tiles.

    stats (2, all_rows): base-2 log-sum-exp, then delta, of (B, H, tiles of queries, BLOCK_M). sums
    (B, H, tiles of queries, BLOCK_M, D) fp32, turns (B, H, tiles of queries) and the ticket start at 0.
    """
    held_shape: gl.constexpr = [1, 1, BLOCK_N, HEAD_DIM]
    ring_shape: gl.constexpr = [STAGES, 1, 1, BLOCK_M, HEAD_DIM]
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, held_shape, k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, held_shape, v_desc.layout)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, ring_shape, q_desc.layout)
    dout_smem = gl.allocate_shared_memory(dout_desc.dtype, ring_shape, dout_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], stats_desc.layout)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], stats_desc.layout)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [BLOCK_N, BLOCK_M], ds_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mine = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    added = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(dout_full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    mbarrier.init(kv_full, count=1)
    mbarrier.init(mine, count=1)
    mbarrier.init(added, count=1)
    mbarrier.init(summed, count=1)
    fence_async_shared()
    ticket = gl.atomic_add(ticket_ptr, 1, sem="relaxed")
    held = (k_smem, v_smem)
    ring = (q_smem, dout_smem, lse_smem, delta_smem)
    gl.warp_specialize(
        [
            (_multiply, (
                sums_ptr, ticket, held, ring, ds_smem, q_full, dout_full, empty, kv_full, mine,
                added, summed, seq_q, seq_k, kv_heads, scale, scale_log2,
                CAUSAL, GROUP, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES,
            )),
            (_take_turns, (
                turns_ptr, ticket, mine, added, seq_q, seq_k, kv_heads,
                CAUSAL, GROUP, BLOCK_M, BLOCK_N,
            )),
            (_load, (
                q_desc, k_desc, v_desc, dout_desc, stats_desc, dk_desc, dv_desc, ticket, held, ring,
                q_full, dout_full, empty, kv_full, summed, seq_q, seq_k, kv_heads, all_rows,
                CAUSAL, GROUP, BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [1, 1],
        [24, 24],
    )  # fmt: skip
