"""No result depends on memory that nobody has written: every op, optimizer, compressor and model, on any CPU.

All tests of this folder run with new memory filled with NaN. Here, besides, each workload gives the
same bits on memory filled with NaN and on zeros, and no product of matrices has an operand that lies
beside unwritten memory (see ``_uninitialized``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils._pytree import tree_leaves

from stoker_kernels import optim
from stoker_kernels.compression import COMPRESSORS, make_compressor, simulate
from stoker_kernels.workloads import Workload, workloads
from tests.kernels._training import STYLES, batch_of, build, loss_of
from tests.kernels.runtime._uninitialized import ProductsReadWrittenMemory

if TYPE_CHECKING:
    from collections.abc import Iterator

# Sizes that no vector or tile divides.
ODD = {
    "rows": 13, "columns": 37, "hidden": 19, "vocab": 101, "queries": 7, "keys": 53, "tokens": 7,
    "seq_len": 23, "tensors": 3, "n": 9001,
}  # fmt: skip


@contextlib.contextmanager
def zeroed_memory() -> Iterator[None]:
    """New memory is not filled: in a process that has just allocated and freed zeros, it mostly is zero."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        held = [torch.zeros(1 << size) for size in range(6, 18) for _ in range(4)]
        del held
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True


def results(work: Workload, dtype: torch.dtype, shape: dict[str, int]) -> list[torch.Tensor]:
    """Outputs and gradients of one call."""
    torch.manual_seed(5)
    inputs = work.inputs("cpu", dtype, **work.sized(**shape))
    outputs = tree_leaves(work.run(**inputs))
    wanted = [out for out in outputs if isinstance(out, torch.Tensor) and out.requires_grad]
    torch.autograd.backward(wanted, [torch.ones_like(out) for out in wanted])
    gradients = [
        leaf.grad
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, torch.Tensor) and leaf.grad is not None
    ]
    return [out for out in [*outputs, *gradients] if isinstance(out, torch.Tensor)]


def check_finite(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        assert not tensor.is_floating_point() or tensor.isfinite().all()


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("cpu", torch.bfloat16), ("cpu", torch.float32), ("reference", torch.bfloat16),
        ("triton", torch.float32),
    ],
    indirect=["backend"], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("work", workloads().values(), ids=list(workloads()))
def test_every_op(work: Workload, dtype: torch.dtype, backend: str) -> None:
    shape = {name: ODD.get(name, size) for name, size in work.small.items()}
    with ProductsReadWrittenMemory():
        filled = results(work, dtype, shape)
    check_finite(filled)
    with zeroed_memory():
        for ours, again in zip(filled, results(work, dtype, shape), strict=True):
            assert torch.equal(ours, again)


def padded(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix whose rows lie 16 values further apart than they are long; NaN between them."""
    return torch.full((rows, columns + 16), torch.nan, dtype=dtype)[:, :columns].copy_(
        torch.randn(rows, columns)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", sorted({*optim.__all__} - {"InBackward", "KFAC"}))
def test_every_optimizer_with_padded_gradients(rule: str, dtype: torch.dtype, backend: str) -> None:
    """A parameter itself may have no gaps; it may be transposed and lie anywhere."""
    straight = [torch.randn(5, columns, dtype=dtype) for columns in (1, 17)]
    crooked = [torch.randn(33, 5, dtype=dtype).t(), torch.randn(40, dtype=dtype)[3:38].view(5, 7)]
    parameters = [torch.nn.Parameter(data) for data in [*straight, *crooked]]
    optimizer = getattr(optim, rule)(parameters, lr=0.01)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = padded(*parameter.shape, dtype)
        optimizer.step()
    states = [state for one in optimizer.state.values() for state in one.values()]
    check_finite([*parameters, *(s for s in states if isinstance(s, torch.Tensor))])


@pytest.mark.parametrize("shape", [(7, 33), (1, 101), (513,)], ids=str)
@pytest.mark.parametrize("name", COMPRESSORS)
def test_every_compressor(name: str, shape: tuple[int, ...], backend: str) -> None:
    workers = [make_compressor(name) for _ in range(2)]
    for _ in range(3):
        gradients = [padded(shape[0], shape[-1], torch.float32)[: shape[0]] for _ in workers]
        if len(shape) == 1:
            gradients = [gradient[0] for gradient in gradients]
        with ProductsReadWrittenMemory():
            check_finite(simulate(workers, gradients, "w"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_every_model_trains(style: str, dtype: torch.dtype) -> None:
    config = STYLES[style]
    model = build(config).to(dtype)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    with ProductsReadWrittenMemory() as watched:
        for _ in range(2):
            loss = loss_of(model, batch_of(config, 3, generator))
            loss.backward()
            check_finite([loss, *(p.grad for p in model.parameters() if p.grad is not None)])
            optimizer.step()
            optimizer.zero_grad()
    assert watched.products > 20
    check_finite(list(model.parameters()))


def test_a_product_beside_unwritten_memory_is_found() -> None:
    buffer = torch.empty(4, 16)
    assert buffer.isnan().all(), "new memory is filled with NaN in this folder"
    operand = buffer[:, :13].copy_(torch.randn(4, 13))
    with (
        pytest.raises(AssertionError, match=r"aten.mm.*\(4, 13\), strides \(16, 1\)"),
        ProductsReadWrittenMemory(),
    ):
        operand @ torch.randn(13, 3)


def test_padding_of_the_logits_reaches_no_gradient() -> None:
    """Seen on CPUs with AMX: bf16, a vocabulary that 16 does not divide."""
    work = workloads()["linear_cross_entropy"]
    for vocab in (17, 33, 100, 257):
        check_finite(results(work, torch.bfloat16, {"rows": 130, "hidden": 32, "vocab": vocab}))
