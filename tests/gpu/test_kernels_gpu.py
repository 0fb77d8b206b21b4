"""The compiled kernels on a real GPU: numerics in bf16, determinism, other devices, convergence.

Run with ``pytest -m gpu tests/gpu``.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the kernel tests need torch (the `train` extra)")

from torch.nn import functional as F  # noqa: E402

from stoker_kernels import cross_entropy, flash_attention, rms_norm  # noqa: E402
from stoker_kernels.models.gpt import GPT, GPTConfig  # noqa: E402
from tests.kernels._numerics import assert_close, leaves  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
    pytest.mark.timeout(300),  # the first launch of each kernel compiles it
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _compiled_and_seeded() -> None:
    triton = pytest.importorskip("triton", reason="the CUDA path needs triton")
    from stoker_kernels.ops.rms_norm.triton import rms_norm_fwd_kernel
    from stoker_kernels.runtime.launch import is_interpreted

    if is_interpreted(rms_norm_fwd_kernel):
        pytest.skip(
            f"triton {triton.__version__} is interpreted in this process: run tests/gpu alone"
        )
    torch.manual_seed(0)


def gpu(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("seq_len", [1, 127, 128, 300, 1024])
def test_attention(seq_len: int, head_dim: int, dtype: torch.dtype) -> None:
    inputs = [gpu(2, 3, seq_len, head_dim, dtype=dtype) for _ in range(3)]
    dout = gpu(2, 3, seq_len, head_dim, dtype=dtype)
    results = []
    for kind, to in (
        (flash_attention, dtype),
        (causal_attention, dtype),
        (causal_attention, torch.float64),
    ):
        q, k, v = leaves(*inputs, dtype=to)
        out = kind(q, k, v)
        out.backward(dout.to(to))
        results.append((out, q.grad, k.grad, v.grad))
    for name, kernel, witness, oracle in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms=100.0)


def test_attention_repeats_bit_for_bit() -> None:
    inputs = [gpu(2, 4, 1000, 64, dtype=torch.bfloat16) for _ in range(3)]
    grads = []
    for _ in range(3):
        q, k, v = leaves(*inputs)
        flash_attention(q, k, v).square().sum().backward()
        grads.append(torch.stack([q.grad, k.grad, v.grad]))
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (37, 100), (513, 1024), (64, 8192), (4, 65536)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, w, dy = gpu(*shape, dtype=dtype), gpu(shape[1], dtype=dtype), gpu(*shape, dtype=dtype)
    results = []
    for ours, to in ((True, dtype), (False, dtype), (False, torch.float64)):
        xs, ws = leaves(x, w, dtype=to)
        y = rms_norm(xs, ws) if ours else F.rms_norm(xs, ws.shape, ws, 1e-6)
        y.backward(dy.to(to))
        results.append((y, xs.grad, ws.grad))
    for name, kernel, witness, oracle in zip(("y", "dx", "dw"), *results, strict=True):
        assert_close(kernel, witness, oracle, name, terms=shape[0] ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (33, 257), (128, 50304)])
def test_cross_entropy(shape: tuple[int, int], dtype: torch.dtype) -> None:
    logits = gpu(*shape, dtype=dtype)
    target = torch.randint(0, shape[1], shape[:1], device="cuda")
    target[1::5] = -100
    results = []
    for ours, to in ((True, dtype), (False, dtype), (False, torch.float64)):
        (xs,) = leaves(logits, dtype=to)
        if ours:
            loss = cross_entropy(xs, target)
        else:
            loss = F.cross_entropy(xs if to == torch.float64 else xs.float(), target)
        loss.backward()
        results.append((loss, xs.grad))
    for name, kernel, witness, oracle in zip(("loss", "dlogits"), *results, strict=True):
        assert_close(kernel, witness, oracle, name)


def test_cross_entropy_past_2_to_the_31_elements() -> None:
    """Row offsets beyond int32: 4.3 GB of bf16 logits and as much gradient."""
    rows, vocab = 2**15 + 8, 2**16
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    logits = torch.zeros(rows, vocab, device="cuda", dtype=torch.bfloat16)
    logits[-1, 5] = 20.0
    logits.requires_grad_()
    target = torch.full((rows,), 5, device="cuda")
    loss = cross_entropy(logits, target, reduction="none")
    assert loss[-1] < 1e-2
    assert abs(loss[0].item() - 16 * 0.6931472) < 1e-3
    loss.sum().backward()
    assert abs(logits.grad[-1, 5].item()) < 1e-2
    assert logits.grad[-2, 5].item() == pytest.approx(-1.0, abs=1e-2)


def test_launches_on_the_tensor_s_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        x = torch.randn(8, 64, device="cuda:1")
        y = rms_norm(x, torch.ones(64, device="cuda:1"))
    torch.testing.assert_close(y, F.rms_norm(x, (64,), eps=1e-6))


def test_compiled_equals_eager() -> None:
    model = GPT(GPTConfig(layers=2)).cuda()
    tokens = torch.randint(0, 256, (4, 128), device="cuda")
    grads = []
    for run in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad()
        run(tokens, tokens)[1].backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_gpt_losses_equal_torch() -> None:
    histories = []
    for ops in ("stoker", "torch"):
        torch.manual_seed(0)
        model = GPT(GPTConfig(ops=ops)).cuda()
        optimizer = model.optimizer()
        history = []
        for step in range(32):
            tokens = (torch.arange(8 * 129, device="cuda").view(8, 129) * 7 + step) % 64
            optimizer.zero_grad()
            _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        histories.append(history)
    torch.testing.assert_close(*histories, rtol=2e-4, atol=0.0)
