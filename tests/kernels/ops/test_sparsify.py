"""Sparse messages: every backend against what the selection promises."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from stoker_kernels.ops.sparsify import above_compress, reference, topk_compress
from tests.kernels._numerics import poison_empty
from tests.kernels.ops._far_apart import sparse, start_at_program

if TYPE_CHECKING:
    from pathlib import Path


def check(
    gradient: torch.Tensor, memory: torch.Tensor, k: int, slack: float = 1 / 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exactly k distinct places, conservation, and nothing much larger left behind."""
    before = memory.double() + gradient.reshape(-1).double()
    values, indices = topk_compress(gradient, memory, k)
    assert values.shape == indices.shape == (k,)
    assert (values.dtype, indices.dtype) == (torch.float32, torch.int32)
    places = indices.long()
    assert len(places.unique()) == k
    total = memory.double().index_add(0, places, values.double())
    torch.testing.assert_close(total, before, rtol=2e-7, atol=0)
    assert not memory[places].any()
    assert memory.abs().max() <= values.abs().min() * (1 + slack)
    return values, indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 3), (31, 31), (8193, 1), (20011, 700)])
def test_the_k_largest_are_sent_and_taken_out(
    backend: str, n: int, k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    check(torch.randn(n).to(dtype), torch.randn(n), k)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 3.0, 1e4, 1e30])
def test_every_magnitude_has_the_same_resolution(backend: str, magnitude: float) -> None:
    check(torch.randn(9000) * magnitude, torch.zeros(9000), 90)


def test_ties_are_broken_by_index(backend: str) -> None:
    values, indices = check(torch.full((9000,), -2.0), torch.zeros(9000), 13)
    assert indices.tolist() == list(range(13))
    assert values.tolist() == [-2.0] * 13
    gradient = torch.ones(9000)
    gradient[8500:8505] = 5.0
    _, indices = check(gradient, torch.zeros(9000), 8)
    assert sorted(indices.tolist()) == [0, 1, 2, *range(8500, 8505)]


def test_a_sample_that_misses_everything_costs_resolution_only(backend: str) -> None:
    """All but a few values are zero, and none of those is in the sample of every second one."""
    gradient = torch.zeros(20_000)
    gradient[1:400:2] = 1.0 + torch.rand(200)
    _, indices = check(gradient, torch.zeros(20_000), 100, slack=3.0)
    assert all(i % 2 == 1 and i < 400 for i in indices.tolist())
    check(torch.zeros(9000), torch.zeros(9000), 5)


def test_all_backends_choose_the_same(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, memory, velocity = torch.randn(3, 20_000).unbind()
    results = []
    for name in ("triton", "reference"):
        monkeypatch.setenv("STOKER_KERNELS_BACKEND", name)
        kept, moving = memory.clone(), velocity.clone()
        scale = torch.full((1,), 0.5)
        sent = topk_compress(gradient, kept, 300, velocity=moving, momentum=0.9, scale=scale)
        results.append((*sent, kept, moving))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "mostly zero", "few levels", "NaN above infinity"])
def test_many_to_a_thread_go_in_order(
    interpreter: None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of which a thread's eight values are many, at a size whose last tile is cut: bit for bit."""
    n, k = 12_291, 9000
    memory = torch.randn(n)
    if kind == "mostly zero":  # zeros are sent as well, and none from beyond the end
        memory *= torch.rand(n) < 0.01
    elif kind == "few levels":
        memory = memory.round()
    elif kind == "NaN above infinity":  # no infinity is sent: they are forgotten
        k = 3
        memory.view(torch.int32)[torch.randperm(n)[:9]] = 0x7FC00000
        memory[torch.randperm(n)[:5]] = float("-inf")
    results = []
    for name in ("triton", "reference"):
        monkeypatch.setenv("STOKER_KERNELS_BACKEND", name)
        kept = memory.clone()
        results.append((*topk_compress(torch.zeros(n), kept, k), kept))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("masking", [True, False])
def test_momentum_is_corrected_and_masked(backend: str, masking: bool) -> None:
    gradient, memory, velocity = (torch.randn(500) for _ in range(3))
    moved = 0.9 * velocity.double() + 2.0 * gradient.double()
    total = memory.double() + moved
    values, indices = topk_compress(
        gradient, memory, 20, velocity=velocity, momentum=0.9, masking=masking,
        scale=torch.full((1,), 2.0),
    )  # fmt: skip
    places = indices.long()
    torch.testing.assert_close(values.double(), total[places], rtol=1e-6, atol=1e-6)
    if masking:
        moved[places] = 0.0
    torch.testing.assert_close(velocity.double(), moved, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800000])
def test_what_is_not_finite_is_sent_and_forgotten(backend: str, bits: int) -> None:
    """The canonical NaN of the CPU, that of the GPU (all ones), and infinity."""
    gradient = torch.randn(9000)
    gradient.view(torch.int32)[[5, 8999]] = bits
    memory, velocity = torch.zeros(9000), torch.zeros(9000)
    values, indices = topk_compress(gradient, memory, 3, velocity=velocity, momentum=0.5)
    assert {5, 8999} < set(indices.tolist())
    assert int((~values.isfinite()).sum()) == 2
    assert memory.isfinite().all()
    assert velocity.isfinite().all()
    gradient[:50] = float("nan")
    topk_compress(gradient, memory, 3)
    assert memory.isfinite().all()


def test_above_a_threshold_in_order_up_to_capacity(backend: str) -> None:
    memory = torch.tensor([0.1, -3.0, 2.0, 0.0, 5.0, -2.0])
    kept = memory.clone()
    values, indices = above_compress(kept, torch.full((1,), 2.0), 6)
    assert values.tolist() == [-3.0, 2.0, 5.0, -2.0, 0.0, 0.0]
    assert indices.tolist() == [1, 2, 4, 5, 0, 0]
    torch.testing.assert_close(kept, torch.tensor([0.1, 0.0, 0.0, 0.0, 0.0, 0.0]))
    kept = torch.randn(20_000)
    expected = (kept.abs() >= 1.0).nonzero().view(-1)[:40]
    wanted = kept[expected]
    values, indices = above_compress(kept, torch.ones(1), 40)
    assert torch.equal(indices.long(), expected)
    assert torch.equal(values, wanted)
    kept = torch.randn(100)
    before = kept.clone()
    values, _ = above_compress(kept, torch.full((1,), float("inf")), 4)
    assert not values.any()
    assert torch.equal(kept, before)


def test_bins_are_monotone_and_edges_are_theirs() -> None:
    """Over all magnitudes and windows: a larger value is in no lower bin, and a bin begins at its edge."""
    bits = torch.arange(0, 2**31 - 1, 104_729, dtype=torch.int64).to(torch.int32)
    for low in (0, 1, 57, 123):
        base = torch.tensor([low << reference.COARSE_SHIFT], dtype=torch.int32)
        bins = reference.bin_of(bits, base)
        assert (bins.diff() >= 0).all()
        assert bins.min() >= 0
        assert bins.max() < reference.BINS
        edges = reference.edge_of(torch.arange(reference.BINS), base)
        used = bins.unique().long()
        first = torch.stack([bits[bins == b].min().long() for b in used])
        assert (edges[used] <= first).all()
        assert (first < edges[used] + (1 << reference.COARSE_SHIFT)).all()


def test_strided_gradient_and_repeat(backend: str) -> None:
    gradient = torch.randn(30, 40).t()
    memories = torch.zeros(1200), torch.zeros(1200)
    a = topk_compress(gradient, memories[0], 50)
    b = topk_compress(gradient.contiguous(), memories[1], 50)
    for x, y in zip((*a, memories[0]), (*b, memories[1]), strict=True):
        assert torch.equal(x, y)


def test_wrong_arguments_are_refused() -> None:
    gradient, memory = torch.randn(8), torch.zeros(8)
    with pytest.raises(ValueError, match="k must be between 1 and the 8 values"):
        topk_compress(gradient, memory, 9)
    with pytest.raises(ValueError, match="memory must be contiguous"):
        topk_compress(gradient, torch.zeros(16)[::2], 2)
    with pytest.raises(ValueError, match="momentum needs a velocity"):
        topk_compress(gradient, memory, 2, momentum=0.9)
    with pytest.raises(ValueError, match="threshold must be"):
        above_compress(memory, torch.ones(2), 2)
    with pytest.raises(ValueError, match="capacity must be between 1"):
        above_compress(memory, torch.ones(1), 0)


@pytest.mark.parametrize("n", [2**31 - 1, 2**31])
def test_more_values_than_int32_indices_are_refused(n: int) -> None:
    memory = torch.empty(n, device="meta")
    calls = (
        lambda: topk_compress(memory, memory, 5),
        lambda: above_compress(memory, torch.empty(1, device="meta"), 5),
    )
    for call in calls:
        if n < 2**31:
            assert [tuple(part.shape) for part in call()] == [(5,), (5,)]
        else:
            with pytest.raises(ValueError, match="at most 2147483647 values have int32 indices"):
                call()


def test_the_last_program_of_2_to_the_31_values(
    interpreter: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest gradient there may be: the lanes of its last tile that are past the end reach 2^31.

    Spans of three tiles, of which the last program begins in the second but last tile of all.
    """
    kernels = import_module("stoker_kernels.ops.sparsify.triton")
    n, tile = 2**31 - 1, 1024
    span = 3 * tile
    program = n // span
    rest = n - program * span
    assert tile < rest < 2 * tile  # the third tile is beyond int32
    gradient, memory = sparse(tmp_path, n), sparse(tmp_path, n)
    tail = torch.randn(rest)
    gradient[-rest:] = tail
    base = torch.tensor([100 << reference.COARSE_SHIFT], dtype=torch.int32)
    counts = sparse(tmp_path, (program + 1) * reference.BINS, torch.int32)
    start_at_program(monkeypatch, program)
    bins = {
        name: getattr(reference, name)
        for name in ("BINS", "FINE_BINS", "FINE_EXTRA", "FINE_SHIFT", "COARSE_SHIFT")
    }
    kernels.launch(
        kernels.accumulate_kernel, (1,), gradient, memory, memory, memory, base, counts, n, span, 0.0,
        HAS_VELOCITY=False, HAS_SCALE=False, TILE=tile, on=gradient, **bins,
    )  # fmt: skip
    assert torch.equal(memory[-rest:], tail)
    assert int(counts[-reference.BINS :].sum()) == rest
    threshold, found = torch.ones(1), (tail.abs() >= 1).nonzero().view(-1)
    number = torch.zeros(program + 1, dtype=torch.int32)
    kernels.launch(
        kernels.count_kernel, (1,), memory, threshold, number, n, span, TILE=tile, on=memory
    )
    assert int(number[-1]) == len(found)
    bounds = torch.stack(
        [reference.magnitude_bits(threshold), torch.tensor([reference.LARGEST_BITS + 1])]
    ).to(torch.int32)
    values, indices = torch.zeros(len(found)), torch.zeros(len(found), dtype=torch.int32)
    first = torch.zeros(program + 1, dtype=torch.int32)
    kernels.launch(
        kernels.select_kernel, (1,), memory, memory, bounds, first, first, values, indices, n, span,
        len(found), MASK_VELOCITY=False, TILE=tile, on=memory,
    )  # fmt: skip
    assert torch.equal(indices.long(), found + (n - rest))
    assert torch.equal(values, tail[found])
    assert not memory[-rest:][found].any()
