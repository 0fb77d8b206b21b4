"""Packed examples train as each does alone, and prompts get no gradient."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels.models import GPT, GPTConfig
from stoker_kernels.nn import Packing
from stoker_train.finetuning import IGNORED, masked_targets, pack_examples

LENGTH = 32


def examples(seed: int, count: int = 40) -> list[tuple[list[int], list[int]]]:
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(64) for _ in range(draw.randint(least, most))]

    return [(tokens(0, 12), tokens(2, 16)) for _ in range(count)]


def test_every_example_is_in_one_row_whole(seed: int) -> None:
    given = examples(seed)
    found: list[int] = []
    for row in pack_examples(iter(given), LENGTH, open_rows=4):
        edges = row.cu_seqlens.tolist()
        assert row.tokens.shape == row.targets.shape == (1, LENGTH)
        assert edges[0] == 0
        assert edges[-1] == LENGTH == row.max_seqlen
        for number, first, end in zip(row.examples, edges, edges[1:], strict=False):
            prompt, answer = given[number]
            assert row.tokens[0, first:end].tolist() == [*prompt, *answer]
            assert row.targets[0, first:end].tolist() == masked_targets(prompt, answer)
        used = edges[len(row.examples)]
        assert (row.targets[0, used:] == IGNORED).all()
        found += row.examples
    assert sorted(found) == list(range(len(given)))


def test_rows_are_filled_as_first_fit_fills_them() -> None:
    sizes = [20, 14, 10, 18, 2, 30]
    given = [([1], [2] * (size - 1)) for size in sizes]
    rows = sorted(row.examples for row in pack_examples(given, LENGTH, open_rows=3))
    assert rows == [(0, 2, 4), (1, 3), (5,)]


def test_rows_of_so_many_sequences_can_be_stacked(seed: int) -> None:
    rows = list(pack_examples(examples(seed), LENGTH, max_sequences=2))
    stacked = torch.stack([row.cu_seqlens for row in rows])
    assert stacked.shape == (len(rows), 4)
    assert max(len(row.examples) for row in rows) <= 2
    for row in rows:
        packing = Packing.of(row.cu_seqlens, LENGTH, row.max_seqlen)
        assert packing.positions.max() < LENGTH
        assert (packing.segments.diff() >= 0).all()


def test_a_packed_row_has_the_loss_and_gradients_of_its_examples_alone(seed: int) -> None:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=64, layers=2, heads=1, dim=32, block_size=LENGTH))
    given = examples(seed, 6)
    (row, *_) = pack_examples(given, LENGTH)
    packing = Packing.of(row.cu_seqlens, LENGTH, row.max_seqlen)
    _, loss = model(row.tokens, row.targets, packing)
    assert loss is not None
    weight = model.get_parameter("layers.0.mlp.up.weight")
    (packed,) = torch.autograd.grad(loss, [weight])
    total = torch.zeros(())
    counted = 0
    for number in row.examples:
        prompt, answer = given[number]
        tokens = torch.tensor([[*prompt, *answer]])
        targets = torch.tensor([masked_targets(prompt, answer)])
        real = int((targets != IGNORED).sum())
        _, own = model(tokens, targets)
        assert own is not None
        total = total + own * real
        counted += real
    (alone,) = torch.autograd.grad(total / counted, [weight])
    torch.testing.assert_close(loss, total / counted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-6)


def test_prompts_and_padding_have_no_gradient() -> None:
    given = [([1, 2, 3, 4], [5, 6]), ([7], [8, 9])]
    (row,) = pack_examples(given, 12)
    logits = torch.randn(1, 12, 16, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits[0], row.targets[0])
    (gradient,) = torch.autograd.grad(loss, [logits])
    touched = gradient[0].abs().sum(-1) > 0
    # The prompt's last token predicts the answer's first, and so on; the answer's last predicts nothing.
    assert touched.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 2 + [False] * 4


def test_what_cannot_be_packed_is_refused_by_number() -> None:
    with pytest.raises(ValueError, match="example 1 has 40 tokens, a row 32"):
        list(pack_examples([([1], [2]), ([1] * 10, [2] * 30)], LENGTH))
    (row,) = pack_examples([([1] * 10, [2] * 30)], LENGTH, too_long="truncate")
    assert (row.targets[0] == 2).sum() == 22
    assert row.targets[0, -1] == IGNORED
    with pytest.raises(ValueError, match="example 0 has 40 tokens"):
        list(pack_examples([([1] * 35, [2] * 5)], LENGTH, too_long="truncate"))
    with pytest.raises(ValueError, match="example 0 has nothing to predict"):
        list(pack_examples([([1, 2], [])], LENGTH))
    with pytest.raises(ValueError, match="length must be at least 2"):
        list(pack_examples([], 1))
    with pytest.raises(ValueError, match="max_sequences must be at least 1"):
        list(pack_examples([], 8, max_sequences=0))
    with pytest.raises(ValueError, match="open_rows must be at least 1"):
        list(pack_examples([], 8, open_rows=0))
