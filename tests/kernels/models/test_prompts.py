"""Prefix, prompt and P-tuning: the formulas, only what was added trains, storing and folding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker_kernels.models import T5, CausalLM, prefix, prompt
from stoker_kernels.models.bert import Bert
from tests.kernels._training import STYLES, batch_of, build, loss_of
from tests.kernels.models.test_falcon_t5 import FALCONS, LENGTHS, T5S

METHODS: dict[str, Any] = {
    "prefix": lambda model: prefix.inject(model, 3),
    "prefix-network": lambda model: prefix.inject(model, 3, hidden=8),
    "prompt": lambda model: prompt.inject(model, 3),
    "p-tuning-mlp": lambda model: prompt.inject(model, 3, network="mlp"),
    "p-tuning-lstm": lambda model: prompt.inject(model, 3, network="lstm", hidden=8),
}
MODULES = {"prefix": prefix, "prompt": prompt, "p": prompt}
# With room for the prompt.
MODELS = {
    **{name: replace(config, block_size=32) for name, config in STYLES.items()},
    "falcon": FALCONS["rw"],
    "t5": T5S["plain"],
}


def make(name: str) -> tuple[torch.nn.Module, Any]:
    """A model and its loss on a fixed batch."""
    config = MODELS[name]
    if name == "t5":
        torch.manual_seed(3)
        model = T5(config)
        tokens = torch.randint(0, 61, (3, 17))
        return model, lambda: model(tokens, tokens[:, :9], LENGTHS)[1]
    inputs = batch_of(replace(config, block_size=20), 3, torch.Generator().manual_seed(1))
    model = build(config)
    return model, lambda: loss_of(model, inputs)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_only_what_was_added_trains_and_it_is_stored_alone(name: str, method: str) -> None:
    model, loss = make(name)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    METHODS[method](model)
    added = {key for key, _ in model.named_parameters()} - before.keys()
    optimizer = model.optimizer(lr=3e-2)  # type: ignore[operator]
    first = loss().item()
    for _ in range(8):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < first
    for key, parameter in model.named_parameters():
        assert parameter.requires_grad == (key in added)
        if key not in added:
            assert torch.equal(parameter, before[key])

    kind = MODULES[method.partition("-")[0]]
    state = {key: value.clone() for key, value in kind.state_dict(model).items()}
    assert sum(t.numel() for t in state.values()) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )
    other, other_loss = make(name)
    METHODS[method](other)
    kind.load_state_dict(other, state)
    assert torch.equal(other_loss(), loss())
    if "-" in method:
        kind.fold(other)
        torch.testing.assert_close(other_loss(), loss())


@pytest.mark.parametrize("ops", ["stoker", "torch"])
@pytest.mark.parametrize("name", ["gpt", "llama", "falcon"])
def test_prompt_and_prefix_of_a_decoder_are_its_own_past(name: str, ops: str) -> None:
    """A prompt of a token's embedding is that token; its keys and values as prefix are, too."""
    config = replace(MODELS[name], ops=ops, layers=1)
    model = build(config)
    assert isinstance(model, CausalLM)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    tokens = torch.randint(0, 61, (2, 12))
    past = torch.tensor([5, 9, 60])
    expected = model(torch.cat([past.expand(2, 3), tokens], 1))[0][:, 3:]
    prompt.inject(model, 3, tokens=past)
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-4, atol=1e-5)
    if name != "falcon":
        return  # elsewhere a prefix has no position, a past token has
    model.prompt = None
    attention = model.layers[0].attention
    with torch.no_grad():
        qkv = attention.qkv(model.layers[0].norm_attention(model.embed(past)))
    keys = qkv.view(3, -1, 32)[:, 4:]  # (P, 2 G, D)
    prefix.inject(model, 3)
    with torch.no_grad():
        attention.prefix.vectors.copy_(keys.flatten(1))
    torch.testing.assert_close(model(tokens)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["prefix", "prompt"])
@pytest.mark.parametrize("ops", ["stoker", "torch"])
def test_padding_stays_unseen(ops: str, method: str) -> None:
    bert = build(replace(MODELS["bert"], ops=ops))
    t5 = T5(replace(MODELS["t5"], ops=ops))
    assert isinstance(bert, Bert)
    tokens, lengths = torch.randint(0, 61, (3, 17)), torch.tensor([17, 1, 12])
    for model, run in (
        (bert, lambda t, n: bert.encoder(t, lengths=n)[0]),
        (
            t5,
            lambda t, n: t5.decode(
                t[:, :1], t5.encode(t, n), n + t5.encode(t[:1]).shape[1] - t.shape[1]
            ),
        ),
    ):
        METHODS[method](model.eval())
        out = run(tokens, lengths)
        for row, length in enumerate(lengths.tolist()):
            alone = run(tokens[row : row + 1, :length], torch.tensor([length]))
            shown = min(length, out.shape[1])
            torch.testing.assert_close(out[row, :shown], alone[0], rtol=1e-4, atol=1e-5)


def test_errors() -> None:
    model = build(MODELS["gpt"])
    for call, match in (
        (lambda: prompt.inject(model, 0), "length must be at least 1"),
        (lambda: prompt.inject(model, 2, tokens=torch.tensor([1])), "the number of tokens"),
        (lambda: prompt.inject(model, 2, network="gru"), "expected none, mlp or lstm"),
        (lambda: prompt.inject(torch.nn.Linear(2, 2), 2), "Linear holds no model"),
        (lambda: prefix.inject(torch.nn.Linear(2, 2), 2), "Linear holds no attention"),
        (lambda: prefix.inject(model, 2, hidden=-1), "hidden at least 0"),
        (lambda: prompt.state_dict(model), "the model has no prompt"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    prompt.inject(model, 3)
    prefix.inject(model, 3)
    with pytest.raises(ValueError, match="has a prompt already"):
        prompt.inject(model, 3)
    with pytest.raises(ValueError, match="has a prefix already"):
        prefix.inject(model, 3)
    with pytest.raises(ValueError, match="sequence of 33 exceeds block_size 32"):
        model(torch.zeros(1, 30, dtype=torch.long))
    state = prefix.state_dict(model)
    with pytest.raises(ValueError, match="names differ"):
        prompt.load_state_dict(model, state)
