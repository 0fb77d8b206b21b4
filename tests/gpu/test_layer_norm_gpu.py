"""LayerNorm, dropout and the residual sum on a real GPU: bf16 at size, the CPU's dropout mask, repeats."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from torch.nn import functional as F  # noqa: E402

from stoker_kernels import layer_norm  # noqa: E402
from stoker_kernels.ops.layer_norm import dropout_mask  # noqa: E402
from stoker_kernels.primitives.philox import keep_scale_of  # noqa: E402
from tests.kernels._numerics import assert_close, leaves  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
P = 0.1


def gpu(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.0, P])
@pytest.mark.parametrize("shape", [(1, 3), (37, 100), (5000, 768), (64, 8192), (4, 65536)])
def test_matches_fp64(shape: tuple[int, int], dropout_p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [gpu(*shape, dtype=dtype) for _ in range(2)]
    tensors += [gpu(shape[1], dtype=dtype) for _ in range(2)]
    upstream = [gpu(*shape, dtype=dtype) for _ in range(2)]
    seed = torch.tensor([2**40 + 3], device="cuda")
    keep = dropout_mask(seed, torch.Size(shape), dropout_p)
    results = []
    for ours, to in ((True, dtype), (False, dtype), (False, torch.float64)):
        x, residual, w, b = leaves(*tensors, dtype=to)
        if ours:
            out = layer_norm(x, w, b, residual=residual, dropout_p=dropout_p, seed=seed)
        else:
            h = residual + torch.where(keep, x * keep_scale_of(dropout_p), 0)
            out = F.layer_norm(h, w.shape, w, b), h
        torch.autograd.backward(out, [g.to(to) for g in upstream])
        results.append((*out, x.grad, residual.grad, w.grad, b.grad))
    names = ("y", "h", "dx", "dresidual", "dw", "db")
    for name, kernel, witness, oracle in zip(names, *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms=4 * shape[0] ** 0.5)


def test_drops_what_the_cpu_drops() -> None:
    seed = torch.tensor([2**50 + 7], device="cuda")
    x = torch.ones(300, 1000, device="cuda")
    _, h = layer_norm(x, x[0], dropout_p=0.3, seed=seed)
    assert torch.equal((h != 0).cpu(), dropout_mask(seed.cpu(), x.shape, 0.3))


def test_repeats_bit_for_bit() -> None:
    x, residual, dy = (gpu(8192, 4096, dtype=torch.bfloat16) for _ in range(3))
    seed = torch.tensor([5], device="cuda")
    grads = []
    for _ in range(3):
        xs, rs, w, b = leaves(x, residual, x[0], x[1])
        y, _ = layer_norm(xs, w, b, residual=rs, dropout_p=P, seed=seed)
        y.backward(dy)
        grads.append(torch.cat([t.grad.flatten() for t in (xs, rs, w, b)]))
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_past_2_to_the_31_elements() -> None:
    rows, columns = 2**19 + 8, 4096
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-3:] = gpu(3, columns, dtype=torch.bfloat16)
    tail = x[-3:].clone().requires_grad_()
    x.requires_grad_()
    w = torch.ones(columns, device="cuda", dtype=torch.bfloat16)
    y, expected = layer_norm(x, w), layer_norm(tail, w)
    assert torch.equal(y[-3:], expected)
    y.backward(x.detach())
    expected.backward(tail.detach())
    assert torch.equal(x.grad[-3:], tail.grad)


def test_a_cuda_graph_draws_a_new_mask_at_every_replay() -> None:
    x = torch.ones(64, 256, device="cuda")
    w = torch.ones(256, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer_norm(x, w, dropout_p=0.5)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, h = layer_norm(x, w, dropout_p=0.5)
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(h != 0)
    assert not torch.equal(*masks)
