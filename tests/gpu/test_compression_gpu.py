"""Gradient compression on a real GPU: the CPU's messages, repeated bits, and training by every method."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from stoker_kernels.compression import COMPRESSORS, OneBitAdam, make_compressor, simulate  # noqa: E402
from stoker_kernels.ops.adasum import adasum  # noqa: E402
from stoker_kernels.ops.adasum import reference as adasum_reference  # noqa: E402
from stoker_kernels.ops.onebit import onebit_compress, onebit_decompress  # noqa: E402
from stoker_kernels.ops.onebit import reference as onebit_reference  # noqa: E402
from stoker_kernels.ops.sparsify import above_compress, topk_compress  # noqa: E402
from tests.kernels._numerics import assert_close  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]
DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16]
LARGE = 12_345_678


def gradients(count: int, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(n, generator=generator, device=DEVICE).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 1025, LARGE])
def test_onebit_is_the_reference(n: int, dtype: torch.dtype) -> None:
    gradient, error = gradients(1, n, dtype)[0], gradients(2, n, torch.float32)[1]
    results = []
    for kept in (error.clone(), error.cpu()):  # the GPU's kernel, and the definition on the CPU
        given = gradient.to(kept.device)
        compress = onebit_compress if kept.device == gradient.device else onebit_reference.compress
        words, scales = compress(given, kept)
        mean = onebit_decompress(words[None], scales[None], n, dtype)
        results.append([part.cpu() for part in (words, scales, kept, mean)])
    ours, theirs = results
    assert torch.equal(ours[0], theirs[0])
    for got, wanted in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (8193, 100), (LARGE, LARGE // 100)])
def test_sparsify_sends_the_largest_and_keeps_the_rest(n: int, k: int, dtype: torch.dtype) -> None:
    gradient = gradients(1, n, dtype)[0]
    memory = torch.zeros(n, device=DEVICE)
    values, indices = topk_compress(gradient, memory, k)
    places = indices.long()
    assert len(places.unique()) == k
    assert torch.equal(memory.index_add(0, places, values), gradient.float())
    assert memory.abs().max() <= values.abs().min() * (1 + 1 / 16)
    kept, capacity = gradient.float().clone(), max(1, n // 2)
    threshold = torch.full((1,), 2.0, device=DEVICE)
    reached = (kept.abs() >= 2.0).nonzero().view(-1)
    values, indices = above_compress(kept, threshold, capacity)
    assert torch.equal(indices[: len(reached)].long(), reached)
    assert torch.equal(values[: len(reached)], gradient.float()[reached])
    assert not values[len(reached) :].any()
    assert not kept[reached].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 8193, LARGE])
def test_adasum_is_the_formula(n: int, dtype: torch.dtype) -> None:
    common, a, b = gradients(3, n, dtype)
    a, b = a + common, b + common
    oracle = adasum_reference.pair(a.double(), b.double())
    witness = adasum_reference.pair(a.float(), b.float()).to(dtype)
    assert_close(adasum([a, b]), witness, oracle, terms=a.abs().max().item())


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_repeat(dtype: torch.dtype) -> None:
    first, second = gradients(2, LARGE, dtype)
    runs = []
    for _ in range(3):
        memories = torch.zeros(2, LARGE, device=DEVICE)
        sent = (*onebit_compress(first, memories[0]), *topk_compress(first, memories[1], 99_999))
        runs.append([*sent, memories, adasum([first, second])])
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert torch.equal(a, b)


def train(method: str, device: str) -> float:
    """Least squares on two workers by ``method``, 60 steps: the share of the first loss that is left."""
    generator = torch.Generator().manual_seed(7)
    data = [torch.randn(64, 40, generator=generator).to(device) for _ in range(2)]
    truth = torch.randn(40, 50, generator=generator).to(device)
    adam = method == "onebit_adam"
    momentum = method == "dgc"  # what it sends is a momentum, some ten times the gradient
    sparse = method in ("topk", "dgc", "sidco")
    options = {"freeze": 20} if adam else {"ratio": 0.05} if sparse else {}
    workers = [make_compressor(method, **options) for _ in data]
    w = torch.nn.Parameter(torch.zeros(40, 50, device=device))
    optimizer: torch.optim.Optimizer = torch.optim.SGD([w], lr=0.02 if momentum else 0.1)
    if adam:
        optimizer = OneBitAdam([w], lr=0.05, freeze=20)
    losses = []
    for _ in range(60):
        errors = [x @ (w.detach() - truth) for x in data]
        losses.append(sum(error.square().sum().item() for error in errors))
        sent = [x.t() @ error / 64 for x, error in zip(data, errors, strict=True)]
        w.grad = simulate(workers, sent, "w")[0]
        optimizer.step()
    return losses[-1] / losses[0]


@pytest.mark.parametrize("method", list(COMPRESSORS))
def test_it_trains_as_on_the_cpu(method: str) -> None:
    ours, theirs = train(method, DEVICE), train(method, "cpu")
    assert theirs < 0.9
    assert abs(ours - theirs) < 0.05 * theirs + 0.01
