"""Loops with a mistake in them: the job ends, and its result says what to mend."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.e2e.train import elastic_loops as loops
from tests.e2e.train.elastic_jobs import WAIT_S, ended
from tests.services import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.train.elastic_jobs import Trainers

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("mistake", "problem", "fix"),
    [
        (
            "data",
            "the data set tuple_iterator has no length",
            "give it __len__, or shards() and read()",
        ),
        ("state", "log cannot be pickled", "generator"),
        ("early", "a collective of the loop outside of ctx has failed", "use ctx.mean()"),
    ],
)
def test_a_loop_that_cannot_train_ends_its_job_with_what_to_mend(
    trainer: Trainers, mistake: str, problem: str, fix: str
) -> None:
    result = trainer(loops.mistaken, (1, 1), config={"mistake": mistake}).fit(WAIT_S)
    assert problem in result.error, result.error
    assert fix in result.error, result.error
    assert result.ledger_ok is None, "no sample was used"


def test_a_rank_that_is_lost_in_a_collective_outside_of_ctx_is_no_riddle(
    trainer: Trainers, tmp_path: Path
) -> None:
    one = trainer(loops.mistaken, (2, 2), config={"mistake": "past ctx"})
    one.submit()
    waits = tmp_path / "steps" / "waits"
    until(
        lambda: waits.exists() and waits.read_text().endswith("\n"), WAIT_S, "rank 1 is not coming"
    )
    os.kill(int(waits.read_text()), signal.SIGKILL)
    result = one.result(WAIT_S)
    assert result.error_kind == "loop", result.error
    assert "a collective of the loop outside of ctx has failed" in result.error, result.error
    assert "use ctx.mean()" in result.error


def test_of_a_plain_iterable_each_sample_is_used_once_though_one_rank_runs_out_of_memory(
    trainer: Trainers, tmp_path: Path
) -> None:
    steps = tmp_path / "steps"
    one = trainer(
        replicas=(2, 2),
        config={"stream": True, "most": 14, "scarce": 1},
        base_batch=32,
        local_batch=(1, 16),
    )
    one.submit()
    until(lambda: any(note["step"] > 15 for note in loops.notes(steps)), WAIT_S, "it goes on")
    one.stop()
    by_step = ended(one, steps)
    sizes = {rank: set() for rank in range(2)}
    for step, noted in by_step.items():
        for note in noted:
            if step > 15:
                sizes[note["rank"]].update(note["passes"])
    assert {one["world"] for one in by_step[max(by_step)]} == {2}
    assert max(sizes[0] | sizes[1]) <= 14, "all ranks have smaller passes from then on"
    assert any(16 in note["passes"] for note in loops.notes(steps))
