"""Options of a sharded trainer that make no sense: each is refused with its field and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.exceptions import BadRequestError, SerializationError
from stoker.train import Checkpoint, Failure, ModelShape, ShardedTrainer, Strategy


def loop(ctx: Any) -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("loop", {"loop": "no function"}),
        ("plan", {"plan": 4}),
        ("plan", {"plan": "best"}),
        ("plan.data", {"plan": Strategy(data=0)}),
        ("plan.tensor", {"plan": Strategy(tensor=2.0)}),
        ("plan.zero", {"plan": Strategy(data=2, zero=4)}),
        ("plan.expert", {"plan": Strategy(data=2, expert=2)}),
        ("plan.sequence", {"plan": Strategy(data=2, sequence=True)}),
        ("plan.interleave", {"plan": Strategy(data=2, interleave=2)}),
        ("plan.offload", {"plan": Strategy(data=2, offload=1)}),
        ("plan.recompute", {"plan": Strategy(recompute="some")}),
        ("model", {"plan": "auto", "batch": 8, "seq_len": 8}),
        ("seq_len", {"plan": "auto", "batch": 8, "model": object()}),
        ("batch", {"plan": Strategy(data=2, micro_batches=3), "batch": 8}),
        ("batch", {"batch": 0}),
        ("seq_len", {"seq_len": True}),
        ("resources", {"resources": {"GPU": 2}}),
        ("resources", {"resources": {}}),
        ("checkpoint.every", {"checkpoint": Checkpoint(every=0)}),
        ("checkpoint.commit_every", {"checkpoint": Checkpoint(commit_every=1)}),
        ("failure.retries", {"failure": Failure(retries=-1)}),
        ("name", {"name": "no/name"}),
        ("seed", {"seed": -1}),
        ("queue", {"queue": 1}),
    ],
)
def test_what_nothing_keeps_is_refused_with_the_field(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError) as caught:
        ShardedTrainer(**{"loop": loop, "plan": Strategy(data=2), **options})
    first, _, fix = str(caught.value).partition("\n")
    assert first.startswith(f"{field} "), first
    assert fix, "the second line says what to do"
    assert caught.value.field == field


def test_what_has_no_pickle_is_named() -> None:
    with pytest.raises(SerializationError, match=r"^config cannot be pickled"):
        ShardedTrainer(loop, plan=Strategy(data=2), config={"stream": (one for one in "ab")})


@pytest.mark.parametrize(
    ("micro_batches", "batch", "size"), [(1, None, 3), (1, 8, 4), (2, 8, 2), (4, 8, 1)]
)
def test_the_batch_sets_the_size_of_micro_batches(
    micro_batches: int, batch: int | None, size: int
) -> None:
    plan = Strategy(data=2, micro_batch=3, micro_batches=micro_batches)
    trainer = ShardedTrainer(loop, plan=plan, batch=batch)
    assert trainer.plan is not None
    assert trainer.plan.micro_batch == size


def test_a_folder_of_another_run_is_refused(tmp_path: Any) -> None:
    (tmp_path / "checkpoint-0000000003-000001-0001").mkdir()
    with pytest.raises(BadRequestError, match=r"^checkpoint[.]path "):
        ShardedTrainer(loop, plan=Strategy(data=2), checkpoint=str(tmp_path))
    kept = Checkpoint(str(tmp_path), resume=True)
    assert ShardedTrainer(loop, plan=Strategy(data=2), checkpoint=kept).checkpoint.resume


def test_auto_takes_what_the_planner_does() -> None:
    shape = ModelShape.__new__(ModelShape)
    trainer = ShardedTrainer(loop, plan="auto", model=shape, batch=8, seq_len=128)
    assert trainer.plan is None, "the planner is asked when it is submitted"
