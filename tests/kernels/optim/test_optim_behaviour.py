"""What an optimizer must do beside its numbers: state, groups, statistics, AMP, the table, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from stoker_kernels import LAMB, LARS, SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop
from stoker_kernels.optim import table
from tests.kernels._numerics import assert_close

ALL = [AdamW, Adam, SGD, LAMB, LARS, Adagrad, Adadelta, RMSprop]


def parameter(*shape: int) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.randn(shape))
    p.grad = torch.randn(shape)
    return p


@pytest.mark.parametrize("make", ALL)
def test_grad_square_sums(backend: str, make: Any) -> None:
    """Per parameter, in order, over groups, dtypes and a missing gradient; and their sum."""
    params = [parameter(7, 5), parameter(2049), parameter(0), parameter(64), parameter(3)]
    params[3].data = params[3].data.bfloat16()
    params[3].grad = torch.randn(64).bfloat16()
    params[1].grad = None
    optimizer = make([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}])
    assert optimizer.grad_square_sum is None
    for _ in range(2):
        optimizer.step()
        wanted = [0.0 if p.grad is None else p.grad.double().square().sum() for p in params]
        wanted_sums = torch.tensor(wanted, dtype=torch.float64)
        for got, want in (
            (optimizer.grad_square_sums, wanted_sums),
            (optimizer.grad_square_sum, wanted_sums.sum()),
        ):
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0.0)
        params[2].grad = params[4].grad = None  # other places the second time


def test_many_blocks_are_summed(backend: str) -> None:
    p = parameter(5 * 8192 + 3)
    optimizer = SGD([p])
    optimizer.step()
    expected = p.grad.double().square().sum()
    torch.testing.assert_close(optimizer.grad_square_sum.double(), expected, rtol=1e-6, atol=0.0)


def test_clipping_is_torch_s(backend: str) -> None:
    params, others = ([parameter(7, 5), parameter(40)] for _ in range(2))
    for p, q in zip(params, others, strict=True):
        q.data, q.grad = p.data.clone(), p.grad.clone()
    optimizer = SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1, max_grad_norm=0.5)
    before = [p.grad.clone() for p in params]
    optimizer.step()
    norm = torch.nn.utils.clip_grad_norm_(others, 0.5)
    torch.optim.SGD(others, lr=0.1).step()
    for p, q, grad in zip(params, others, before, strict=True):
        torch.testing.assert_close(p, q)
        assert torch.equal(p.grad, grad)
    torch.testing.assert_close(optimizer.grad_square_sum.sqrt(), norm)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, at infinity - infinity
@pytest.mark.parametrize("make", ALL)
def test_grad_scaler(backend: str, make: Any) -> None:
    """The scale is divided out on the device; a step with an infinity changes nothing at all."""
    p = parameter(24)
    q = torch.nn.Parameter(p.detach().clone())
    q.grad = p.grad.clone()
    scaled, plain = make([p], lr=0.1), make([q], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        scaler.scale(torch.ones(()))
        grad = torch.randn(24)
        p.grad = 1024.0 * grad
        if step == 1:
            p.grad[5] = float("inf")
            scaler.step(scaled)
            scaler.update(1024.0)
            assert scaled.state[p]["step"] == 1
            assert not scaled.grad_square_sum.isfinite()
            continue
        q.grad = grad
        scaler.step(scaled)
        scaler.update(1024.0)
        plain.step()
        torch.testing.assert_close(scaled.grad_square_sum, plain.grad_square_sum)
    torch.testing.assert_close(p, q)
    for name, value in plain.state[q].items():
        torch.testing.assert_close(scaled.state[p][name], value)
    assert not hasattr(scaled, "grad_scale")


def test_unaligned_strided_and_missing_tensors(backend: str) -> None:
    """A view 4 bytes into a buffer, a transposed parameter and gradient, one without gradient."""
    buffer = torch.randn(101)
    views = [buffer[1:90], torch.randn(6, 9).t(), torch.randn(5, 4), torch.randn(3)]
    expected = [v.clone() for v in views]
    around = buffer[[0, *range(90, 101)]].clone()
    results = []
    for kind, tensors in ((AdamW, views), (torch.optim.AdamW, expected)):
        params = [torch.nn.Parameter(t) for t in tensors]
        optimizer = kind(params, lr=0.1)
        for step in range(3):
            for i, p in enumerate(params[:3]):
                grad = torch.sin(torch.arange(p.numel()) + float(step + i))
                p.grad = grad.view(p.shape[::-1]).t() if i == 2 else grad.view(p.shape)
            if step == 1:
                params[0].grad = None  # its step count now lags
            optimizer.step()
        results.append([p.detach() for p in params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert torch.equal(results[0][3], views[3])
    assert torch.equal(buffer[[0, *range(90, 101)]], around)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_at_new_addresses(backend: str, set_to_none: bool) -> None:
    p, kept = torch.nn.Parameter(torch.ones(24)), []
    optimizer = SGD([p], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        (p * torch.ones(24)).sum().backward()
        kept.append(p.grad)
        optimizer.step()
    assert torch.equal(p, torch.full((24,), -0.5))


def test_steps_after_the_first_build_nothing(interpreter: None) -> None:
    p = parameter(24)
    optimizer = AdamW([p])
    optimizer.step()
    before = table._cached.cache_info()
    for _ in range(2):
        optimizer.step()
    assert table._cached.cache_info().misses == before.misses
    p.grad = p.grad.clone()
    optimizer.step()
    assert table._cached.cache_info().misses == before.misses + 1


def test_offsets_past_2_to_the_31(interpreter: None) -> None:
    """One block far into a tensor that is not there: its address is so that only this block is."""
    from stoker_kernels.optim.triton import kernels

    block, chunk = 2**31 // 256 + 3, 256
    p, g = torch.ones(chunk), torch.full((chunk,), 2.0)
    rows = torch.zeros(1, table.COLUMNS, dtype=torch.int64)
    rows[0, 0] = p.data_ptr() - block * chunk * 4
    rows[0, 1] = g.data_ptr() - block * chunk * 4
    rows[0, 5] = block * chunk + 100
    tensor_of_block = torch.zeros(block + 1, dtype=torch.int32)
    scalars = torch.zeros(1, kernels.SCALARS.value)
    for column in (kernels.WRITE, kernels.SCALE, kernels.STEP_SIZE):
        scalars[0, column.value] = 1.0
    squares = torch.zeros(block + 1)
    types = dict.fromkeys(("P_TYPE", "G_TYPE", "S_TYPE"), kernels.tl.float32)
    kernels.sgd_kernel[(1,)](
        rows, tensor_of_block, scalars, block, squares, 0, **types, ALIGNED=False, ROUNDED=False,
        HAS_BUFFER=False, BLOCK=128, CHUNK=chunk,
    )  # fmt: skip
    assert torch.equal(p[:100], torch.full((100,), -1.0))
    assert torch.equal(p[100:], torch.ones(chunk - 100))
    assert squares[block] == 400.0


@pytest.mark.parametrize("lr", ["number", "tensor"])
def test_schedulers_set_the_rate(backend: str, lr: str) -> None:
    results = []
    for kind in (AdamW, torch.optim.AdamW):
        p = torch.nn.Parameter(torch.ones(24))
        optimizer = kind([p], lr=torch.tensor(0.1) if (kind, lr) == (AdamW, "tensor") else 0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(3):
            p.grad = torch.ones(24)
            optimizer.step()
            scheduler.step()
        results.append(p.detach())
    torch.testing.assert_close(*results)


PAIRS = [
    (AdamW, torch.optim.AdamW, {"lr": 0.1}),
    (Adam, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (SGD, torch.optim.SGD, {"lr": 0.1}),
    (Adagrad, torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),
    (Adadelta, torch.optim.Adadelta, {"lr": 0.1}),
    (RMSprop, torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.3}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), PAIRS)
def test_state_moves_to_and_from_torch(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    start = torch.randn(6)
    finals = []
    for kinds in ((ours, theirs), (theirs, ours), (theirs, theirs)):
        p = torch.nn.Parameter(start.clone())
        saved = None
        for kind in kinds:
            optimizer = kind([p], **options)
            if saved is not None:
                groups = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
            for i in range(3):
                p.grad = torch.full((6,), 0.1 * (i + 1))
                optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
        finals.append(p.detach())
    torch.testing.assert_close(finals[0], finals[2])
    torch.testing.assert_close(finals[1], finals[2])


def test_a_checkpoint_of_torch_loads_whole() -> None:
    """Groups too: what torch has no word for takes its default."""
    p = parameter(6)
    theirs = torch.optim.AdamW([p], lr=0.3)
    theirs.step()
    ours = AdamW([p], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert ours.param_groups[0]["lr"] == 0.3
    assert ours.state[p]["step"] == 2
    assert ours.param_groups[0].get("capturable", True)  # what CapturedStep asks
    amsgrad = torch.optim.AdamW([p], amsgrad=True)
    with pytest.raises(ValueError, match="AdamW has no amsgrad"):
        ours.load_state_dict(amsgrad.state_dict())
    centered = torch.optim.RMSprop([p], centered=True)
    with pytest.raises(ValueError, match="RMSprop has no centered"):
        RMSprop([p]).load_state_dict(centered.state_dict())


@pytest.mark.parametrize("make", ALL)
def test_round_trip_goes_on_bit_for_bit(backend: str, make: Any) -> None:
    p = torch.nn.Parameter(torch.randn(24).bfloat16())
    options = {"stochastic_rounding": True, "seed": 5}
    optimizer = make([p], **options)
    p.grad = torch.randn(24).bfloat16()
    optimizer.step()
    saved, value = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    optimizer.step()
    q = torch.nn.Parameter(value)
    q.grad = p.grad
    fresh = make([q])
    fresh.load_state_dict(saved)
    fresh.step()
    assert torch.equal(p, q)
    for name, state in optimizer.state[p].items():
        assert state.dtype == torch.float32
        assert torch.equal(state, fresh.state[q][name])


def test_copies_groups_and_closures(backend: str) -> None:
    p, q = parameter(4), parameter(8)
    optimizer = AdamW([p], lr=0.1, max_grad_norm=1.0)
    optimizer.step()
    again = copy.deepcopy(optimizer)
    again.step()
    assert again.max_grad_norm == 1.0
    optimizer.add_param_group({"params": [q], "lr": 0.0, "weight_decay": 0.0})
    before = q.detach().clone()
    optimizer.step()
    assert torch.equal(q, before)
    assert optimizer.grad_square_sums.shape == (2,)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    expected = p.detach().square().sum()
    assert torch.equal(optimizer.step(closure).detach(), expected)
    optimizer.zero_grad()
    assert optimizer.step() is None


def test_a_second_backward_sees_that_parameters_changed(backend: str) -> None:
    p = parameter(8)
    loss = (p * p).sum()
    AdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_compiled_training_step(backend: str) -> None:
    """torch.compile steps over the optimizer and sees the rate change."""
    torch._dynamo.reset()
    p = torch.nn.Parameter(torch.ones(8))
    optimizer = SGD([p], lr=0.5)

    def train() -> None:
        optimizer.zero_grad()
        (p * 2.0).sum().backward()
        optimizer.step()

    compiled = torch.compile(train, backend="aot_eager")
    compiled()
    optimizer.param_groups[0]["lr"] = 0.25
    compiled()
    assert torch.equal(p, torch.full((8,), -0.5))


@pytest.mark.parametrize("make", ALL)
def test_nothing_waits_for_the_device(make: Any) -> None:
    """On meta tensors, whose values nobody can read, a whole step runs."""
    p = torch.nn.Parameter(torch.zeros(8, device="meta"))
    p.grad = torch.zeros(8, device="meta")
    make([p], stochastic_rounding=False, max_grad_norm=1.0).step()


def test_errors() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="AdamW: lr must be at least 0"):
        AdamW([p], lr=-1.0)
    with pytest.raises(ValueError, match="betas"):
        AdamW([p], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"Adadelta: rho must lie in \[0, 1\], got 1.5"):
        Adadelta([p], rho=1.5)
    with pytest.raises(ValueError, match="Adagrad: lr_decay must be at least 0"):
        Adagrad([p], lr_decay=-0.1)
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        SGD([p], nesterov=True)
    with pytest.raises(ValueError, match="norm_bounds"):
        LAMB([p], norm_bounds=(2.0, 1.0))
    with pytest.raises(ValueError, match="max_grad_norm must be positive"):
        LARS([p], max_grad_norm=0.0)
    with pytest.raises(TypeError, match="real parameters"):
        SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    gaps = torch.nn.Parameter(torch.ones(4, 4)[:, :2])
    optimizer = Adam([p])
    with pytest.raises(ValueError, match=r"gaps or overlaps .* make it .contiguous"):
        optimizer.add_param_group({"params": [gaps]})
    assert len(optimizer.param_groups) == 1
    p.grad = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    with pytest.raises(TypeError, match="no sparse gradients"):
        optimizer.step()


def test_float64_is_refused_by_the_kernels(interpreter: None) -> None:
    p = torch.nn.Parameter(torch.ones(2).double())
    p.grad = torch.ones(2).double()
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        AdamW([p]).step()


def test_parameters_of_several_dtypes(backend: str) -> None:
    params = [torch.nn.Parameter(torch.randn(9).to(t)) for t in (torch.float32, torch.float16)]
    starts = [p.detach().double() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    AdamW(params, lr=0.1, weight_decay=0.0).step()
    for p, start in zip(params, starts, strict=True):
        oracle = start - 0.1
        assert_close(p, oracle.to(p.dtype), oracle)
