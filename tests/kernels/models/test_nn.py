"""The modules: each agrees with PyTorch's own of the same weights, whichever way it is switched."""

from __future__ import annotations

import copy

import pytest
import torch

from stoker_kernels import nn
from stoker_kernels.nn.head import IGNORE_INDEX

OPS = ["stoker", "torch"]


def both_gradients(
    module: torch.nn.Module, other: torch.nn.Module, *inputs: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (of ``module``, of ``other``): outputs, input gradients, parameter gradients."""
    results = []
    for run in (module, other):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = run(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(outs, [torch.linspace(-1, 1, o.numel()).view_as(o) for o in outs])
        grads = [p.grad for p in run.parameters()]
        results.append([*outs, *(x.grad for x in leaves), *grads])
    return list(zip(*results, strict=True))


def assert_same(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ops", OPS)
def test_norms_replace_torchs(ops: str) -> None:
    x = torch.randn(3, 5, 24) + 1
    for ours, theirs in (
        (nn.LayerNorm(24, ops=ops), torch.nn.LayerNorm(24)),
        (nn.RMSNorm(24, ops=ops), torch.nn.RMSNorm(24, eps=1e-6)),
    ):
        for p in theirs.parameters():
            torch.nn.init.normal_(p)
        ours.load_state_dict(theirs.state_dict())  # the same names
        assert_same(both_gradients(ours, theirs, x))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_norm_of_a_residual_sum(kind: type) -> None:
    ours, theirs = kind(24), kind(24, ops="torch")
    assert_same(both_gradients(ours, theirs, torch.randn(3, 5, 24), torch.randn(3, 5, 24)))
    # Under autocast the update is bf16 and the stream fp32: the stream decides.
    y, h = ours(torch.randn(2, 24, dtype=torch.bfloat16), torch.randn(2, 24))
    assert y.dtype == h.dtype == torch.float32


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_dropout_joins_the_residual_sum(kind: type, ops: str) -> None:
    norm = kind(64, dropout=0.25, ops=ops)
    x, residual = torch.ones(64, 64), torch.zeros(64, 64)
    y, h = norm(x, residual)
    dropped = (h == 0).float().mean().item()
    assert dropped == pytest.approx(0.25, abs=0.03)
    assert torch.equal(h[h != 0], torch.full_like(h[h != 0], 1 / 0.75))
    norm.eval()
    assert torch.equal(norm(x, residual)[1], x)
    assert not torch.equal(y, norm(x, residual)[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_mlp(approximate: str, bias: bool) -> None:
    ours = nn.GELUMLP(12, 20, approximate=approximate, bias=bias)
    if bias:
        torch.nn.init.normal_(ours.up_bias)
    theirs = copy.deepcopy(ours)
    theirs.ours = False
    assert_same(both_gradients(ours, theirs, torch.randn(3, 12)))
    plain = torch.nn.Sequential(
        torch.nn.Linear(12, 20, bias=bias), torch.nn.GELU(approximate), ours.down
    )
    with torch.no_grad():
        plain[0].weight.copy_(ours.up.weight)
        if bias:
            plain[0].bias.copy_(ours.up_bias)
    x = torch.randn(3, 12)
    torch.testing.assert_close(ours(x), plain(x))


def test_swiglu_mlp() -> None:
    ours = nn.SwiGLUMLP(12, 20)
    theirs = copy.deepcopy(ours)
    theirs.ours = False
    assert_same(both_gradients(ours, theirs, torch.randn(3, 12)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(kv_heads: int, causal: bool) -> None:
    rotary = nn.Rotary(32, 16)
    ours = nn.Attention(128, 4, kv_heads, causal=causal, bias=True, rotary=rotary)
    theirs = copy.deepcopy(ours)
    theirs.ours = theirs.rotary.ours = False
    x = torch.randn(2, 13, 128)
    assert_same(both_gradients(ours, theirs, x))
    packing = nn.Packing.of(torch.tensor([0, 5, 5, 13]), 13, 8)
    for module in (ours, theirs):
        torch.testing.assert_close(
            module(x[:1], packing),
            torch.cat([module(x[:1, :5]), module(x[:1, 5:])], 1),
            rtol=1e-4, atol=1e-5,
        )  # fmt: skip


def test_attention_replaces_torchs() -> None:
    ours, theirs = (
        nn.Attention(64, 2, causal=False, bias=True),
        torch.nn.MultiheadAttention(64, 2, batch_first=True),
    )
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(ours.qkv.bias)
        theirs.out_proj.weight.copy_(ours.out.weight)
        theirs.out_proj.bias.copy_(ours.out.bias)
    x = torch.randn(2, 9, 64)
    torch.testing.assert_close(ours(x), theirs(x, x, x)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ops", OPS)
def test_rotary_depends_on_distance_alone(ops: str) -> None:
    rotary = nn.Rotary(32, 64, ops=ops)
    q, k = torch.randn(1, 1, 1, 32), torch.randn(1, 1, 1, 32)

    def score(a: int, b: int) -> torch.Tensor:
        return (rotary(q, torch.tensor([a])) * rotary(k, torch.tensor([b]))).sum()

    torch.testing.assert_close(score(3, 1), score(40, 38), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(score(3, 1), score(3, 2))
    x = torch.randn(2, 5, 3, 32)
    torch.testing.assert_close(rotary(x), rotary(x, torch.arange(5)))
    torch.testing.assert_close(rotary(x)[:, 0], x[:, 0])  # position 0 turns nothing


def test_rotary_tables_stay_exact_wherever_the_model_goes() -> None:
    expected = nn.Rotary(32, 64).cos
    cast = nn.Rotary(32, 64).to(torch.bfloat16)
    assert cast.cos.dtype == torch.float32
    assert torch.equal(cast.cos, expected)
    with torch.device("meta"):
        meta = nn.Rotary(32, 64)
    assert torch.equal(meta.to_empty(device="cpu").cos, expected)
    assert not nn.Rotary(32, 64).state_dict()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}])
def test_head(options: dict[str, float], bias: bool) -> None:
    heads = [nn.LMHead(16, 40, bias=bias, ops=ops) for ops in OPS]
    heads[1].load_state_dict(heads[0].state_dict())
    x, targets = torch.randn(3, 7, 16), torch.randint(0, 40, (3, 7))
    targets[0, :3] = IGNORE_INDEX
    results = []
    for head in heads:
        for kind in ("loss", "loss_of"):
            leaf = x.clone().requires_grad_()
            head.zero_grad()
            given = leaf if kind == "loss" else head(leaf)
            loss = getattr(head, kind)(given, targets, **options)
            loss.backward()
            results.append([loss, leaf.grad, *(p.grad.clone() for p in head.parameters())])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_packing() -> None:
    packing = nn.Packing.of(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5, 3)
    assert packing.positions.tolist() == [0, 1, 0, 1, 2]
    assert packing.segments.tolist() == [0, 0, 2, 2, 2]
    assert packing.mask(causal=True).sum() == 3 + 6
    assert packing.mask(causal=False).sum() == 4 + 9
    padded = nn.Packing.padded(torch.tensor([3, 1, 4]), 4)
    assert padded.cu_seqlens.tolist() == [0, 3, 4, 5, 8, 12, 12]
    assert padded.positions.tolist() == [0, 1, 2, 0, 0, 0, 1, 2, 0, 1, 2, 3]


def test_errors() -> None:
    for build, match in (
        (lambda: nn.RMSNorm(8, dropout=1.5), "RMSNorm: dropout must lie"),
        (lambda: nn.LayerNorm(8, ops="cuda"), "LayerNorm: ops 'cuda': expected stoker or torch"),
        (lambda: nn.Attention(30, 4), "dim 30 is not a multiple of heads 4"),
        (lambda: nn.Attention(32, 4, 3), "heads 4 is not a multiple of kv_heads 3"),
        (lambda: nn.Packing.of(torch.zeros(2), 4, 4), "cu_seqlens must be 1-d int32"),
    ):
        with pytest.raises(ValueError, match=match):
            build()
    packing = nn.Packing.of(torch.tensor([0, 4]), 4, 4)
    with pytest.raises(ValueError, match=r"one row \(1, T\), got 2 rows"):
        nn.Attention(32, 1)(torch.zeros(2, 4, 32), packing)
