"""Models cut into parts of a pipeline: one after the other they compute the whole, under its names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from stoker.exceptions import BadRequestError
from stoker_kernels.models import (
    GPT,
    Bert,
    CausalLM,
    GPTConfig,
    bert_base,
    falcon_rw_1b,
    gpt2_small,
    llama3_8b,
    prompt,
)
from stoker_train.sharded.parallel.layers import layers_of
from stoker_train.sharded.pipelining.splitting import Chain, count_layers, cut_evenly, split

if TYPE_CHECKING:
    from collections.abc import Callable

SMALL = {
    "vocab_size": 32, "layers": 5, "heads": 4, "dim": 16, "block_size": 8, "ops": "torch",
    "dropout": 0.0,
}  # fmt: skip


def all_parts(model: nn.Module, pipeline: int, chain: Chain | None = None) -> list[nn.Module]:
    stages = cut_evenly(count_layers(model, chain), 2 * pipeline)
    ranks = [
        split(model, stages, pipeline=pipeline, rank=rank, chain=chain) for rank in range(pipeline)
    ]
    return [ranks[number % pipeline][number // pipeline] for number in range(2 * pipeline)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: CausalLM(gpt2_small(**SMALL)),
        lambda: CausalLM(llama3_8b(**{**SMALL, "kv_heads": 2, "hidden": 24})),
        lambda: CausalLM(falcon_rw_1b(**SMALL)),
        lambda: GPT(GPTConfig(**{**SMALL, "post_norm": True, "full_logits": True})),
    ],
    ids=["gpt2", "llama3", "falcon", "post_norm"],
)
def test_parts_of_our_models_compute_the_whole(make: Callable[[], CausalLM]) -> None:
    model = make()
    tokens = torch.randint(0, 32, (2, 8))
    logits, loss = model(tokens, tokens)
    parts = all_parts(model, 2)
    x: Any = tokens
    for part in parts[:-1]:
        x = part(x)
        assert x.shape == (2, 8, 16)
    found_logits, found = parts[-1](x, targets=tokens)
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
    assert (found_logits is None) == (logits is None)
    whole = model.state_dict()
    names = [name for part in parts for name in part.state_dict()]
    twice = {"embed.weight"} if model.config.tied else set()
    assert set(names) == whole.keys()
    assert {name for name in names if names.count(name) > 1} == twice
    assert parts[-1].tied == (dict.fromkeys(twice, (0, 3)))
    trained = [name for part in parts for name, _ in part.named_parameters()]
    assert set(trained) == {name for name, _ in model.named_parameters()}


def test_parts_leave_the_meta_device_tied() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(**SMALL))
    last = all_parts(model, 2)[-1]
    last.to_empty(device="cpu")
    assert not any(p.is_meta for p in last.parameters())
    assert last.head.weight is last.embed.weight
    with torch.device("meta"):
        anyones = nn.Module()
        anyones.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
        anyones.layers[3].weight = anyones.layers[0].weight
    *_, last = all_parts(anyones, 2, Chain("layers"))
    assert list(dict(last.named_parameters())) == ["layers.0.weight"]
    last.to_empty(device="cpu")
    assert last.layers[0].weight is list(last.layers)[-1].weight
    assert last.tied == {"layers.0.weight": (0, 3)}


def anyone() -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(32, 4)
    model.body = nn.Module()
    model.body.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model.head = nn.Linear(4, 32)
    return model


class Doubled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("make", "stages", "chain", "text"),
    [
        (anyone, 2, None, "Module cannot be cut into stages, as nobody knows its layers"),
        (lambda: Doubled(nn.Linear(2, 2)), 1, None, "Doubled cannot be cut into stages"),
        (lambda: Bert(bert_base(**SMALL)), 2, None, "train this one with pipeline=1"),
        (anyone, 2, Chain("body"), "its lists: body.layers"),
        (anyone, 2, Chain("body.layers", ("embed",), ("hat",)), "no module 'hat'.\nit has: embed"),
        (
            anyone,
            2,
            Chain("body.layers", ("embed",)),
            "leaves 2 parameters of Module out.\n.*: head.weight",
        ),
        (anyone, 4, Chain("body.layers"), "3 layers cannot be cut into 4 stages"),
        (lambda: GPT(GPTConfig(**SMALL)), 6, None, "take pipeline x interleave of at most 5"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    make: Callable[[], nn.Module], stages: int, chain: Chain | None, text: str
) -> None:
    model = make()
    with pytest.raises(BadRequestError, match=text):
        cuts = cut_evenly(count_layers(model, chain), stages)
        split(model, cuts, pipeline=stages, rank=0, chain=chain)


def test_stages_and_prompts_that_do_not_fit_are_refused() -> None:
    model = GPT(GPTConfig(**SMALL))
    for stages in ([[0, 2], [3, 5]], [[0, 2], [2, 4]], [[0, 5], [5, 5]], [[0, 6], [6, 7]]):
        with pytest.raises(BadRequestError, match="are not the 5 layers of the model in order"):
            split(model, stages, pipeline=2, rank=0)
    with pytest.raises(BadRequestError, match="1 stages do not go over a pipeline of 2 ranks"):
        split(model, [[0, 5]], pipeline=2, rank=0)
    prompt.inject(model, 2)
    with pytest.raises(BadRequestError, match="a model with a prompt cannot be cut"):
        split(model, [[0, 2], [2, 5]], pipeline=2, rank=0)


def test_modules_of_a_sequence_stay_layers() -> None:
    """ZeRO gathers them one by one, and recomputation finds them."""
    twice = nn.Linear(2, 2)
    parts = all_parts(nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)), twice, twice), 2)
    assert [len(layers_of(part)) for part in parts] == [2, 2, 2, 1]
