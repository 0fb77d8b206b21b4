"""What holds for every op, checked through its workloads: schemas, fakes, compile, autocast, strides.

A new op is covered by having a workload; its own numerics are in its own ``test_<op>.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from stoker_kernels.workloads import Workload, workload, workloads

if TYPE_CHECKING:
    from collections.abc import Iterator

DIFFERENTIABLE = [name for name, work in workloads().items() if work.differentiable]


@pytest.fixture(params=list(workloads()))
def work(request: pytest.FixtureRequest) -> Workload:
    return workloads()[request.param]


class _Recorder(TorchDispatchMode):
    """Keeps the calls of our ops, with their arguments as they were before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "stoker":
            self.calls[func] = tree_map_only(torch.Tensor, _copy, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same strides; a stride-0 gradient stays one."""
    if 0 in tensor.stride():
        return tensor.detach()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor.detach())


def recorded(work: Workload, dtype: torch.dtype) -> dict[Any, tuple[Any, Any]]:
    """The ops that a small call of ``work`` runs, each with its last arguments."""
    with _Recorder() as recorder:
        work.call("cpu", dtype, **work.small)
    return recorder.calls


def test_opcheck(work: Workload, backend: str) -> None:
    """Schema, fake and autograd registration of every op, on every backend."""
    calls = recorded(work, torch.float32)
    assert calls or backend == "cpu", f"{work.name} runs no op of ours"
    for op, (args, kwargs) in calls.items():
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, args, kwargs, test_utils=tests)


def test_fakes_match_shapes_strides_and_dtypes(work: Workload) -> None:
    for op, (args, kwargs) in recorded(work, torch.bfloat16).items():
        real = tree_leaves(op(*args, **kwargs))
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
        fake = tree_leaves(op(*fake_args, **fake_kwargs))
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), op


def gradients(work: Workload, run: Any, seed: int = 0) -> Iterator[torch.Tensor]:
    """Outputs of ``run`` on the small inputs, then the gradients of every input that wants one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs = work.inputs("cpu", torch.float32, **work.small)
        outputs = run(**inputs)
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [t for t in tensors if t.requires_grad]
    # Stride 0, as .sum() sends it.
    torch.autograd.backward(wanted, [torch.ones(()).expand(t.shape) for t in wanted])
    yield from tensors
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            assert leaf.grad is not None
            yield leaf.grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_compiles_whole_and_equals_eager(name: str, backend: str) -> None:
    work = workload(name)
    torch._dynamo.reset()
    compiled = torch.compile(work.run, fullgraph=True, backend="aot_eager")
    for eager, traced in zip(gradients(work, work.run), gradients(work, compiled), strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_backend_agrees(
    name: str, interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = workload(name)
    kernel = list(gradients(work, work.run))
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    for ours, wanted in zip(kernel, gradients(work, work.run), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_repeats_bit_for_bit(name: str, backend: str) -> None:
    work = workload(name)
    for first, second in zip(gradients(work, work.run), gradients(work, work.run), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_autocast_and_inference(name: str, backend: str) -> None:
    work = workload(name)
    inputs = work.inputs("cpu", torch.bfloat16, **work.small)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = work.run(**inputs)
    for out in outputs if isinstance(outputs, tuple) else (outputs,):
        assert out.dtype in (torch.bfloat16, torch.float32)
        assert out.isfinite().all()
    with torch.no_grad():
        for out in tree_leaves(work.run(**inputs)):
            assert not out.requires_grad


def test_sizes_are_checked() -> None:
    with pytest.raises(KeyError, match="no workload 'rms_nrom': there are"):
        workload("rms_nrom")
    with pytest.raises(TypeError, match="no size 'row': its sizes are rows, columns"):
        workload("rms_norm").sized(row=3)
