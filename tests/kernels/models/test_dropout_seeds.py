"""A model's dropouts in our kernels draw their seeds in one launch a step, and share none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels._training import STYLES, batch_of, build, loss_of


class Draws(TorchDispatchMode):
    """Counts the draws of seeds, and keeps the seeds that our ops were given."""

    def __init__(self) -> None:
        super().__init__()
        self.randints, self.seeds = 0, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.randints += name == "aten::randint"
        if name in ("stoker::attention_fwd", "stoker::layer_norm_fwd"):
            given = zip(func._schema.arguments, args, strict=False)
            named = {argument.name: value for argument, value in given} | (kwargs or {})
            if named.get("seed") is not None:
                self.seeds.append(int(named["seed"].item()))
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["gpt", "bert", "llama"])
def draws(request: pytest.FixtureRequest) -> Iterator[Draws]:
    config = replace(STYLES[request.param], dropout=0.1)
    model, inputs = build(config), batch_of(config, 2, torch.Generator().manual_seed(1))
    with Draws() as found:
        loss_of(model, inputs).backward()
    yield found


def test_one_draw_a_step_and_a_seed_for_each_dropout(draws: Draws) -> None:
    assert draws.randints == 1
    assert len(draws.seeds) == len(set(draws.seeds)) >= 2
