"""Memory of a rank, against the published tables and formulas."""

from __future__ import annotations

import pytest

from stoker_train.planning.memory import in_flight, layer_bytes, state_bytes
from stoker_train.planning.model_shape import transformer
from stoker_train.planning.precision import precision
from stoker_train.planning.strategy import Recompute, Strategy

MIXED = precision("bf16", "adamw")
GB = 1e9


@pytest.mark.parametrize(
    ("ranks", "stage", "expected_gb"),
    [(4, 1, 52.5), (4, 2, 41.3), (4, 3, 30.0), (64, 1, 31.4), (64, 2, 16.6), (64, 3, 1.88)],
)
def test_zero_keeps_what_its_paper_says(ranks: int, stage: int, expected_gb: float) -> None:
    """Rajbhandari et al. 2020, table 1: 7.5 B parameters."""
    found = state_bytes(7.5e9, stage, ranks, MIXED)
    assert found.total / GB == pytest.approx(expected_gb, rel=0.01)


def classic(layers: int = 4, hidden: int = 1024, heads: int = 16) -> tuple[int, int, object]:
    shape = transformer(
        "classic", layers=layers, hidden=hidden, heads=heads, vocab=1000, fused_attention=False
    )
    return hidden, heads, shape.layers[0]


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("sequences", [1, 4])
def test_activations_follow_the_formula_and_its_parallel_forms(tensor: int, sequences: int) -> None:
    """Korthikanti et al. 2022, table 2."""
    h, a, layer = classic()
    s, b, t = 2048, sequences, tensor
    sbh = s * b * h

    def kept(**choices: object) -> float:
        return layer_bytes(layer, s, Strategy(tensor=t, micro_batch=b, **choices), MIXED)

    assert kept() == pytest.approx(sbh * (10 + 24 / t + 5 * a * s / (h * t)))
    assert kept(sequence=True) == pytest.approx(sbh / t * (34 + 5 * a * s / h))
    assert kept(sequence=True, recompute=Recompute.SELECTIVE) == pytest.approx(34 * sbh / t)
    assert kept(recompute=Recompute.FULL) == pytest.approx(2 * sbh)
    if t == 1:
        assert kept() == pytest.approx(sbh * (34 + 5 * a * s / h))


def test_a_stage_keeps_as_many_micro_batches_as_lie_before_its_first_backward_pass() -> None:
    one_f_one_b = Strategy(pipeline=4, micro_batches=8)
    assert [in_flight(stage, one_f_one_b) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(0, Strategy(pipeline=4, micro_batches=2)) == 2
    assert in_flight(0, Strategy(pipeline=1, micro_batches=8)) == 1
    interleaved = Strategy(pipeline=4, micro_batches=8, interleave=2)
    assert [in_flight(rank, interleaved) for rank in range(4)] == [5.5, 4.5, 3.5, 2.5]


def test_an_unknown_type_or_optimizer_is_named() -> None:
    with pytest.raises(ValueError, match="dtype 'fp12' is not known"):
        precision("fp12")
    with pytest.raises(ValueError, match="optimizer 'adm' is not known"):
        precision("bf16", "adm")
    assert precision("fp32", "sgd").state_bytes == 8
