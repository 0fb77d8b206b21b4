"""Our attention behind transformers' interface: every layout of rows, and a clear error for the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from stoker_kernels import apply, register_attention
from stoker_kernels.patching.attention import attend
from stoker_kernels.patching.losses import LogitsNotMadeError
from stoker_kernels.patching.masks import Layout, make_layout
from tests.kernels.patching._families import batch, build

MASKS = {
    "left": [[0, 0, 1, 1, 1, 1], [1] * 6],
    "right": [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]],
    "both": [[0, 1, 1, 1, 0, 0], [0] * 6],
}


def layout(mask: torch.Tensor, rows: int, causal: bool, window: int | None) -> Layout:
    from transformers import masking_utils as hf

    function = hf.causal_mask_function if causal else hf.bidirectional_mask_function
    if window:
        function = hf.sliding_window_causal_mask_function(window)
    keys = mask.shape[1]
    return make_layout(
        len(mask), rows, keys, q_offset=keys - rows, mask_function=function, attention_mask=mask.bool(),
        local_size=window,
    )  # fmt: skip


def expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """fp64, by a matrix; rows that see nothing are zero."""
    rows, keys = q.shape[2], k.shape[2]
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    seen = mask.bool()[:, None, None, :].expand(-1, -1, rows, -1)
    if causal:
        seen = seen & (distance >= 0)
    if window:
        seen = seen & (distance < window)
    groups = q.shape[1] // k.shape[1]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(groups, 1),
        v.double().repeat_interleave(groups, 1),
    )
    out = F.scaled_dot_product_attention(q, k, v, seen)
    return out.masked_fill(~seen.any(-1, keepdim=True), 0.0).transpose(1, 2)


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize(
    ("rows", "causal", "window"), [(6, True, None), (6, False, None), (6, True, 2), (2, True, None)]
)
def test_real_rows_see_what_their_mask_shows(
    padding: str, rows: int, causal: bool, window: int | None
) -> None:
    check_rows(padding, rows, causal, window)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("rows", "causal", "window"), [(6, True, None), (6, False, None)])
def test_kernels_compute_the_same_rows(rows: int, causal: bool, window: int | None) -> None:
    check_rows("both", rows, causal, window)


def check_rows(padding: str, rows: int, causal: bool, window: int | None) -> None:
    mask = torch.tensor(MASKS[padding])
    q, k, v = (
        torch.randn(2, heads, n, 32, requires_grad=True) for heads, n in ((4, rows), (2, 6), (2, 6))
    )
    module = SimpleNamespace(is_causal=causal)
    out, weights = attend(module, q, k, v, layout(mask, rows, causal, window))
    assert weights is None
    assert out.shape == (2, rows, 4, 32)
    reference = expected(q, k, v, mask, causal, window)
    real = mask[:, 6 - rows :].bool() if causal else torch.ones(2, rows, dtype=torch.bool)
    weight = torch.randn_like(out) * real[:, :, None, None]
    ours = torch.autograd.grad(out, (q, k, v), weight)
    theirs = torch.autograd.grad(reference, (q, k, v), weight.double())
    torch.testing.assert_close(out[real], reference[real].float(), atol=2e-5, rtol=1e-4)
    if causal:
        assert not out[~real].any()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.float(), atol=5e-5, rtol=1e-4)


def test_alibi_and_softcap_reach_the_kernel() -> None:
    q, k, v = (torch.randn(1, 2, 5, 32) for _ in range(3))
    module = SimpleNamespace(is_causal=True)
    slopes = torch.tensor([0.5, 0.25])
    out, _ = attend(module, q, k, v, None, alibi_slopes=slopes, softcap=3.0)
    scores = (q.double() @ k.double().mT / 32**0.5 / 3.0).tanh() * 3.0
    distance = torch.arange(5)[:, None] - torch.arange(5)
    scores = scores - slopes.double()[:, None, None] * distance
    scores = scores.masked_fill(distance < 0, -torch.inf)
    torch.testing.assert_close(out, (scores.softmax(-1) @ v.double()).transpose(1, 2).float())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"must be \(B, S\), got \(1, 1, 4, 4\)"),
        (
            {"attention_mask": Layout(True), "is_causal": False},
            "is_causal=False contradicts the mask",
        ),
        (
            {"attention_mask": Layout(True), "sliding_window": 2},
            "sliding_window 2, the mask's is None",
        ),
        ({"attention_mask": None, "output_attentions": True}, 'attn_implementation="eager"'),
        ({"attention_mask": None, "s_aux": torch.ones(2)}, "s_aux is not supported"),
        ({"attention_mask": None, "cu_seq_lens_q": torch.ones(2)}, "without packed position_ids"),
    ],
)
def test_what_is_not_computed_raises(arguments: dict[str, Any], message: str) -> None:
    q = torch.randn(1, 2, 4, 32)
    with pytest.raises(ValueError, match=message):
        attend(SimpleNamespace(is_causal=True), q, q, q, **arguments)


def test_masks_of_ones_own_raise() -> None:
    model = build("llama")
    apply(model)
    inputs = batch("none")
    gaps = inputs["attention_mask"].clone()
    gaps[0, 4] = 0
    with pytest.raises(ValueError, match="the real tokens of a row must be neighbours"):
        model(inputs["input_ids"], attention_mask=gaps)
    with pytest.raises(ValueError, match=r"must be \(B, S\)"):
        model(inputs["input_ids"], attention_mask=torch.ones(3, 1, 12, 12))
    right = batch("right")
    with pytest.raises(ValueError, match="tokens of padding have labels that count"):
        model(right["input_ids"], attention_mask=right["attention_mask"], labels=right["input_ids"])
    with pytest.raises(ValueError, match="output_attentions"):
        model(inputs["input_ids"], output_attentions=True)


def test_logits_that_were_not_made_say_so() -> None:
    model = build("llama")
    applied = apply(model)
    out = model(**batch("right"))
    for use in (lambda: out.logits.shape, lambda: out.logits[0], lambda: out.logits + 1):
        with pytest.raises(LogitsNotMadeError, match="makes no logits"):
            use()
    assert not hasattr(out.logits, "to")  # libraries ask so
    assert model.eval()(**batch("right")).logits.shape == (3, 12, 96)
    applied.undo()
    apply(model.train(), skip={"linear_cross_entropy"})
    assert model(**batch("right")).logits.shape == (3, 12, 96)


def test_dropout_drops_in_training_alone(seed: int) -> None:
    model = build("llama", seed, attention_dropout=0.5)
    inputs = batch("right", seed)
    model.eval()
    quiet = model(**inputs).loss.item()
    apply(model)
    assert model(**inputs).loss.item() == pytest.approx(quiet, abs=1e-5)
    model.train()
    torch.manual_seed(seed)
    first = model(**inputs).loss.item()
    assert first != pytest.approx(quiet, abs=1e-5)
    torch.manual_seed(seed)
    assert model(**inputs).loss.item() == first


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("llama", {"head_dim": 16}, "head dimension 16"),
        ("falcon", {"alibi": True}, "ALiBi is rounded to bfloat16"),
    ],
)
def test_attention_that_does_not_fit_is_left(
    family: str, changes: dict[str, Any], why: str, seed: int
) -> None:
    model = build(family, seed, **changes)
    inputs = batch("right", seed)
    loss = model(**inputs).loss.item()
    applied = apply(model)
    assert any(why in reason for reason in applied.left.values()), str(applied)
    assert model.config._attn_implementation == "sdpa"
    assert model(**inputs).loss.item() == pytest.approx(loss, abs=1e-5)


def test_another_model_of_the_same_config_keeps_its_attention() -> None:
    model = build("llama")
    other = type(model)(model.config)
    apply(model)
    assert (model.config._attn_implementation, other.config._attn_implementation) == (
        "stoker",
        "sdpa",
    )


def test_the_name_alone_is_enough_for_transformers(seed: int) -> None:
    register_attention()
    model = build("llama", seed)
    inputs = batch("left", seed)
    loss = model(**inputs).loss.item()
    model.set_attn_implementation("stoker")
    assert model(**inputs).loss.item() == pytest.approx(loss, abs=1e-5)
