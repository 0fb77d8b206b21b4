"""What surrounds an op: torch.func's transforms, and tensors that are shards of others."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.func import functional_call, grad, vmap
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_unflatten

import stoker_kernels as ops
from stoker_kernels.workloads import workload, workloads

if TYPE_CHECKING:
    from collections.abc import Iterator

DIFFERENTIABLE = [name for name, work in workloads().items() if work.differentiable]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_grad_is_autograd_s(name: str, backend: str) -> None:
    work = workload(name)
    leaves, tree = tree_flatten(work.inputs("cpu", torch.float32, **work.small))
    wanted = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]

    def loss(*values: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)  # for what drops out
        given = list(leaves)
        for place, value in zip(wanted, values, strict=True):
            given[place] = value
        out = work.run(**tree_unflatten(given, tree))
        parts = [t for t in (out if isinstance(out, tuple) else (out,)) if t.is_floating_point()]
        return sum((t.sin().sum() for t in parts), torch.zeros(()))

    values = [leaves[place] for place in wanted]
    expected = torch.autograd.grad(loss(*values), values, allow_unused=True)
    detached = [value.detach() for value in values]
    found = grad(loss, argnums=tuple(range(len(values))))(*detached)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, torch.zeros_like(ours) if theirs is None else theirs)


def test_gradients_of_each_sample(backend: str) -> None:
    """vmap over grad, as differential privacy has it: against a loop."""
    model = torch.nn.Sequential(
        ops.RMSNorm(32), torch.nn.Linear(32, 64, bias=False), ops.BiasGELU(64), ops.SwiGLU()
    )
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(3, 2, 32)

    def loss(given: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        y = functional_call(model, given, (sample,))  # (2, 32)
        qkv = y.view(1, 1, 2, 32)
        attended = ops.flash_attention(qkv, qkv, qkv)
        scores = ops.softmax(ops.layer_norm(attended, torch.ones(32)), causal=True)
        return ops.cross_entropy(scores.view(2, 32), torch.tensor([0, 5]), z_loss=1e-3)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # samples run in turn
        found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for number, sample in enumerate(x):
        for name, theirs in grad(loss)(parameters, sample).items():
            torch.testing.assert_close(found[name][number], theirs)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone; a real backend's threads could outlive the group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_are_refused_with_the_remedy(mesh: Any) -> None:
    x = distribute_tensor(torch.randn(4, 8, 32), mesh, [Shard(0)])
    heads = x[None]
    weight, tables = torch.ones(32), ops.rotary_tables(32, 8)
    targets = torch.zeros(4, 8, dtype=torch.int64)
    calls = {
        "rms_norm": lambda: ops.rms_norm(x, weight),
        "layer_norm": lambda: ops.layer_norm(x.to_local(), distribute_tensor(weight, mesh)),
        "softmax": lambda: ops.softmax(x),
        "swiglu": lambda: ops.swiglu(x),
        "geglu": lambda: ops.geglu(x),
        "bias_gelu": lambda: ops.bias_gelu(x, weight),
        "fused_dense": lambda: ops.fused_dense(x, torch.ones(5, 32)),
        "fused_glu_dense": lambda: ops.fused_glu_dense(x, torch.ones(6, 32)),
        "grouped_gemm": lambda: ops.grouped_gemm(x, torch.ones(1, 5, 32), targets[0, :1].int()),
        "fp8_linear": lambda: ops.fp8_linear(x, torch.ones(5, 32)),
        "rotary": lambda: ops.rotary(heads, *tables),
        "cross_entropy": lambda: ops.cross_entropy(x, targets),
        "linear_cross_entropy": lambda: ops.linear_cross_entropy(x, torch.ones(5, 32), targets),
        "flash_attention": lambda: ops.flash_attention(heads, heads, heads),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name}: \w+ is a DTensor.*\n.*local_map.*to_local"):
            call()


def test_the_remedy_works(mesh: Any) -> None:
    plain, weight = torch.randn(4, 8, 32), torch.rand(32)
    x = distribute_tensor(plain, mesh, [Shard(0)]).requires_grad_()
    norm = local_map(
        ops.rms_norm, out_placements=[Shard(0)], in_placements=([Shard(0)], None), device_mesh=mesh
    )
    y = norm(x, weight)
    assert isinstance(y, DTensor)
    y.sum().backward()
    expected = plain.clone().requires_grad_()
    ops.rms_norm(expected, weight).sum().backward()
    assert torch.equal(x.grad.to_local(), expected.grad)
