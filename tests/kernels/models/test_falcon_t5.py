"""Falcon and T5: sizes, and training steps against the same models written a second time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from stoker_kernels.models import (
    T5,
    CausalLM,
    T5Config,
    TransformerConfig,
    falcon_7b,
    falcon_40b,
    falcon_rw_1b,
    t5_base,
    t5_small,
    t5_v1_1_small,
)
from stoker_kernels.nn.alibi import alibi_slopes
from tests.kernels.models._plain import falcon_loss, t5_loss

MINI = {"vocab_size": 61, "layers": 2, "block_size": 24, "dim": 128, "heads": 4}
FALCONS = {
    "7b": falcon_7b(**MINI),
    "40b": falcon_40b(**{**MINI, "kv_heads": 2}),
    "rw": falcon_rw_1b(**MINI),
}
T5_MINI = {
    "vocab_size": 61, "layers": 2, "heads": 2, "dim": 48, "head_dim": 32, "hidden": 40,
    "buckets": 8, "max_distance": 10, "dropout": 0.0,
}  # fmt: skip
T5S = {"plain": t5_small(**T5_MINI), "gated": t5_v1_1_small(**{**T5_MINI, "decoder_layers": 1})}
LENGTHS = torch.tensor([17, 5, 12])


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (falcon_7b(), 6_921_720_704),
        (falcon_40b(), 41_303_293_952),
        (falcon_rw_1b(), 1_311_625_216),
        (t5_small(), 60_506_624),
        (t5_base(), 222_903_552),
        (t5_v1_1_small(), 76_961_152),
    ],
)
def test_published_models_have_their_size(
    config: TransformerConfig | T5Config, published: int
) -> None:
    with torch.device("meta"):
        model = T5(config) if isinstance(config, T5Config) else CausalLM(config)
    assert count(model) == config.parameter_count == published


def sgd_steps(
    model: torch.nn.Module, loss_of: Callable[[], torch.Tensor], parameters: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Three steps: the losses, and the weights at the end."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in parameters)]


def assert_steps_equal(
    model: torch.nn.Module,
    ours: Callable[[], torch.Tensor],
    plain: Callable[[dict[str, torch.Tensor]], torch.Tensor],
) -> None:
    names = [name for name, _ in model.named_parameters()]
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    theirs = sgd_steps(model, lambda: plain(weights), [weights[n] for n in names])
    mine = sgd_steps(model, ours, list(model.parameters()))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)
    assert mine[2] < mine[0]


@pytest.mark.parametrize("ops", ["stoker", "torch"])
@pytest.mark.parametrize("kind", FALCONS)
def test_falcons_steps_equal_plain_torchs(kind: str, ops: str) -> None:
    config = replace(FALCONS[kind], ops=ops)
    torch.manual_seed(1)
    model = CausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)  # biases and norms too
    tokens = torch.randint(0, 61, (2, 17))
    inputs = tokens[:, :-1], tokens[:, 1:]
    assert_steps_equal(model, lambda: model(*inputs)[1], lambda w: falcon_loss(w, config, *inputs))


@pytest.mark.parametrize("ops", ["stoker", "torch"])
@pytest.mark.parametrize("kind", T5S)
def test_t5s_steps_equal_plain_torchs(kind: str, ops: str) -> None:
    config = replace(T5S[kind], ops=ops)
    torch.manual_seed(1)
    model = T5(config)
    with torch.no_grad():
        model.embed.weight.mul_(0.3)  # as they are drawn, three steps amplify a rounding error
        if not config.tied:
            model.head.weight.mul_(0.1)
        for name, p in model.named_parameters():
            if "relative" in name or p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.3)
    tokens, targets = torch.randint(0, 61, (3, 17)), torch.randint(0, 61, (3, 14))
    targets[1, 6:] = -100
    assert_steps_equal(
        model,
        lambda: model(tokens, targets, LENGTHS)[1],
        lambda w: t5_loss(w, config, tokens, targets, LENGTHS),
    )


@pytest.mark.parametrize("config", [*FALCONS.values(), *T5S.values()])
@pytest.mark.parametrize("how", [True, "selective"])
def test_recomputation_changes_no_bit(
    config: TransformerConfig | T5Config, how: bool | str
) -> None:
    tokens = torch.randint(0, 61, (2, 12))
    grads = []
    for checkpoint in (False, how):
        torch.manual_seed(3)
        changed = replace(config, checkpoint=checkpoint, dropout=0.2)
        model = T5(changed) if isinstance(changed, T5Config) else CausalLM(changed)
        torch.manual_seed(4)
        model(tokens, tokens)[1].backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_t5_sees_no_padding_and_no_future() -> None:
    model = T5(T5S["plain"]).eval()
    tokens, read = torch.randint(0, 61, (3, 17)), torch.randint(0, 61, (3, 9))
    out = model.decode(read, model.encode(tokens, LENGTHS), LENGTHS)
    for row, length in enumerate(LENGTHS.tolist()):
        part = slice(row, row + 1)
        alone = model.decode(read[part], model.encode(tokens[part, :length]))
        torch.testing.assert_close(out[part], alone, rtol=1e-4, atol=1e-5)
    later = read.clone()
    later[:, 5:] = (later[:, 5:] + 1) % 61
    other = model.decode(later, model.encode(tokens, LENGTHS), LENGTHS)
    torch.testing.assert_close(other[:, :5], out[:, :5])
    assert not torch.allclose(other[:, 5:], out[:, 5:])


def test_slopes_are_the_papers() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    expected = [2.0**-i for i in range(1, 9)] + [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(expected))


@pytest.mark.parametrize("kind", ["rw", "40b"])
def test_packed_sequences_equal_single_ones(kind: str) -> None:
    from stoker_kernels.nn import Packing

    for ops in ("stoker", "torch"):
        model = CausalLM(replace(FALCONS[kind], ops=ops))
        tokens = torch.randint(0, 61, (1, 20))
        packing = Packing.of(torch.tensor([0, 5, 6, 20]), 20, 14)
        single = [model(part)[0] for part in tokens.split([5, 1, 14], 1)]
        torch.testing.assert_close(
            model(tokens, packing=packing)[0], torch.cat(single, 1), rtol=1e-4, atol=1e-5
        )


def test_compiles_and_leaves_the_meta_device() -> None:
    tokens = torch.randint(0, 61, (2, 12))
    for config in (replace(FALCONS["7b"], layers=1), replace(T5S["plain"], layers=1)):
        kind = T5 if isinstance(config, T5Config) else CausalLM
        torch.manual_seed(3)
        model = kind(config)
        with torch.device("meta"):
            moved = kind(config)
        moved.to_empty(device="cpu").load_state_dict(model.state_dict())
        assert count(moved) == config.parameter_count
        run = torch.compile(moved, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(run(tokens, tokens)[1], model(tokens, tokens)[1])


def test_errors() -> None:
    with pytest.raises(ValueError, match="parallel_norms must be 0, 1 or 2"):
        TransformerConfig(parallel_norms=3)
    with pytest.raises(ValueError, match="checkpoint 'full': expected"):
        TransformerConfig(checkpoint="full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="T5Config: decoder_layers must be at least 1"):
        t5_small(decoder_layers=0)
    with pytest.raises(ValueError, match="mlp 'gelu': expected one of relu, geglu"):
        t5_small(mlp="gelu")
