"""Measuring candidates: only right ones count, the launcher's own comes first, and time has an end."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker_kernels import measuring, tuning
from stoker_kernels.measuring import Trial, difference, least_seconds, measure_candidates
from stoker_kernels.workloads import Cost, Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN, FAST, WRONG, CRASHES, NAN = ({"BLOCK": size} for size in (1, 2, 3, 4, 5))
CANDIDATES = [FAST, WRONG, CRASHES, NAN, OWN]


def _inputs(device: Any, dtype: torch.dtype, rows: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, device=device, dtype=dtype, requires_grad=True)}


def _run(x: torch.Tensor) -> torch.Tensor:
    """Doubles; the gradient is wrong, or an error is raised, as the configuration says."""
    config = tuning.choose("doubles", OWN, lambda: CANDIDATES, rows=x.shape[0], dtype=x.dtype)
    if config == CRASHES:
        raise RuntimeError("out of resources: shared memory")
    if config == NAN:
        return x * float("nan")
    doubled = x * 2
    return doubled + (x - x.detach()) if config == WRONG else doubled


FAKE = Workload("doubles", _inputs, _run, lambda dtype, rows: Cost(), {"rows": 8}, {"rows": 2})


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measuring, "workload", lambda name: FAKE)
    monkeypatch.setattr(measuring, "SAMPLES_S", 0.0)
    tuning.clear()
    yield
    tuning.clear()


def told(**options: Any) -> list[Trial]:
    return list(measure_candidates("doubles", "float32", {"rows": 4}, device="cpu", **options))


def test_each_candidate_begins_and_ends_and_the_wrong_ones_are_out() -> None:
    trials = told()
    assert [t.state for t in trials[::2]] == ["begun"] * 5
    ends = {t.config["BLOCK"]: t for t in trials[1::2]}
    assert {b: t.state for b, t in ends.items()} == {
        1: "measured", 2: "measured", 3: "failed", 4: "failed", 5: "failed",
    }  # fmt: skip
    assert [t.number for t in trials[1::2]] == [1, 2, 3, 4, 5] and ends[1].config == OWN
    assert ends[3].note.startswith("tensor 1 differs by")  # the gradient, not the output
    assert ends[4].note == "RuntimeError: out of resources: shared memory"
    assert ends[5].note == "tensor 0 is not finite where it should be"
    for block in (1, 2):
        assert 0 < ends[block].low_seconds <= ends[block].seconds <= ends[block].high_seconds
    assert all(t.key == {"rows": 4, "dtype": "float32"} for t in trials)


def test_when_the_time_is_up_the_launchers_own_was_measured_and_the_rest_is_late() -> None:
    trials = told(time_limit_s=0.0)
    assert [(t.number, t.state) for t in trials] == [
        (1, "begun"), (1, "measured"), (2, "late"), (3, "late"), (4, "late"), (5, "late"),
    ]  # fmt: skip


def test_what_was_tried_is_skipped() -> None:
    first = told()
    done = {t.identity for t in first if t.number in (1, 2, 4)}
    assert {t.number for t in told(skip=done)} == {3, 5}


def test_a_launcher_whose_own_choice_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="out of resources"):
        monkeypatch.setitem(OWN, "BLOCK", 4)
        told()


def test_nothing_to_choose_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kernels.measuring.test_measuring.CANDIDATES", [OWN])
    with pytest.raises(ValueError, match="doubles has nothing to choose"):
        told()


@pytest.mark.parametrize(
    ("want", "got", "said"),
    [
        (torch.ones(3), torch.ones(3) + 1e-6, ""),
        (torch.ones(3), torch.ones(3) + 1e-3, "differs by 1.0e-03 RMS from values of 1.0e+00"),
        (torch.ones(3, dtype=torch.bfloat16), torch.full((3,), 1.0078, dtype=torch.bfloat16), ""),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), "is torch.float64 (3,), not (3,)"),
        (torch.arange(3), torch.tensor([0, 1, 3]), "has other values"),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 2.0]), "is not finite where"),
        (torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), ""),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf]), "has other infinities"),
        (torch.empty(0), torch.empty(0), ""),
        (torch.zeros(2), torch.zeros(2), ""),
        (torch.zeros(2), torch.ones(2), "differs"),
    ],
)
def test_differences_beyond_the_order_of_summation(
    want: torch.Tensor, got: torch.Tensor, said: str
) -> None:
    found = difference([want], [got])
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("cost", "rates", "least"),
    [
        (Cost(forward_nbytes=3 << 24, backward_nbytes=1 << 24), (2.0, 1.0), 4.0),
        (Cost(forward_flops=4 * 128**3, forward_nbytes=1), (2.0, 1.0), 2.0),
        (Cost(), (2.0, 1.0), 0.0),
    ],
)
def test_the_roofline_is_what_bytes_or_operations_take(
    monkeypatch: pytest.MonkeyPatch, cost: Cost, rates: tuple[float, float], least: float
) -> None:
    fake = dataclasses.replace(FAKE, cost=lambda dtype, rows: cost)
    monkeypatch.setattr(measuring, "workload", lambda name: fake)
    measured = iter(rates)

    def took(step: Any, device: str) -> tuple[float, float, float]:
        step()
        return (next(measured), 0.0, 0.0)

    monkeypatch.setattr(measuring, "_measured", took)
    assert least_seconds("doubles", "float32", {"rows": 4}, device="cpu") == pytest.approx(least)
