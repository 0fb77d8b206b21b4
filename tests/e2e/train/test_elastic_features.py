"""What an elastic job may be told while it trains: each order is taken by all ranks at one step."""

from __future__ import annotations

import importlib
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stoker_train.elastic.policies import Policy
from tests.e2e.train import elastic_loops as loops
from tests.e2e.train.elastic_jobs import WAIT_S, ended, has
from tests.services import until

if TYPE_CHECKING:
    from stoker_train.elastic.policies import Actions, Metrics
    from tests.e2e.train.elastic_jobs import Trainers

pytest.importorskip("torch")

PROGRAM = """from tests.e2e.train.elastic_loops import noted

def loop(ctx, config):
    noted(ctx, config)
"""


class InTurn(Policy):
    """Asks for one thing after the other, each once what was asked for before is done."""

    def __init__(self) -> None:
        self.stage = 0

    def after_step(self, metrics: Metrics, actions: Actions) -> None:
        """Ask for the next thing."""
        if self.stage == 0 and metrics.replicas == 2:
            actions.set_lr(0.5)
            actions.set_batch_size(32)
            self.stage = 1
        elif self.stage == 1 and metrics.batch == 32:
            actions.set_shares((3.0, 1.0))
            actions.set_sync({"name": "local_sgd", "every": 2})
            self.stage = 2
        elif self.stage == 2 and metrics.sync == "local_sgd":
            actions.resize(1)
            self.stage = 3
        elif self.stage == 3 and metrics.replicas == 1:
            actions.request_stop("all was done")
            self.stage = 4


def test_what_policies_ask_for_is_taken_by_all_ranks_at_one_step(
    trainer: Trainers, tmp_path: Path
) -> None:
    one = trainer(policies=(InTurn(),), replicas=(2, 2), max_batch=48, lr="linear", min_replicas=1)
    one.submit()
    by_step = ended(one, tmp_path / "steps")
    kinds = []
    for step in sorted(by_step):
        first = by_step[step][0]
        sizes = [sum(note["passes"]) for note in by_step[step]]
        kind = (first["world"], first["batch"], round(first["lr"] * 1e6, 6), first["sync"])
        if kind not in kinds:
            kinds.append(kind)
        if sum(sizes) == 32 and first["world"] == 2 and first["sync"] == "local_sgd":
            assert sizes == [24, 8], "the shares that were asked for"
    assert kinds[-1] == (1, 32, 1.0, "local_sgd"), kinds
    assert (2, 16, 1.0, "all_reduce") in kinds
    assert (2, 32, 1.0, "all_reduce") in kinds, "half the rate, twice the batch"
    assert (2, 32, 1.0, "local_sgd") in kinds


def test_a_storm_of_requests_is_coalesced_and_what_users_ask_for_is_taken(
    trainer: Trainers, tmp_path: Path
) -> None:
    one = trainer(max_batch=24)
    one.submit()
    has(one, 2)
    before = one.progress()["generation"]
    for count in (1, 2) * 4 + (2, 1):
        one.resize(count)
    one.set_batch_size(1000)
    one.set_sync({"name": "local_sgd", "every": 2})
    has(one, 1)
    assert one.progress()["generation"] - before < 5, "ten requests are not ten generations"
    until(
        lambda: any(
            note["batch"] == 24 and note["sync"] == "local_sgd"
            for note in loops.notes(tmp_path / "steps")
        ),
        WAIT_S,
        "the batch is what the job's limits allow",
    )
    one.stop()
    by_step = ended(one, tmp_path / "steps")
    assert {noted[0]["world"] for noted in by_step.values()} == {1, 2}


def test_a_job_that_ran_out_of_memory_goes_on_with_smaller_passes_and_chooses_its_batch(
    trainer: Trainers, tmp_path: Path
) -> None:
    one = trainer(
        replicas=(2, 2),
        base_batch=32,
        max_batch=96,
        local_batch=(1, 16),
        interval_s=0.5,
        lr="sqrt",
        config={"most": 14, "pass_s": 0.02},
    )
    one.submit()
    until(
        lambda: any(note["batch"] > 32 for note in loops.notes(tmp_path / "steps")),
        WAIT_S,
        "another batch is better",
    )
    one.stop()
    by_step = ended(one, tmp_path / "steps")
    assert any(16 in note["passes"] for note in loops.notes(tmp_path / "steps"))
    assert all(
        max(note["passes"]) <= 14
        for step, noted in by_step.items()
        for note in noted
        if step >= 5 and note["passes"]
    )


def test_a_newcomer_of_another_version_of_the_code_is_quarantined(
    trainer: Trainers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program_of_the_test.py"
    program.write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    one = trainer(loop=importlib.import_module("program_of_the_test").loop)
    one.submit()
    has(one, 2)
    one.resize(1)
    has(one, 1)
    with program.open("a") as file:
        file.write("# changed\n")
    one.resize(2)
    until(
        lambda: "has another version of the code" in one.progress().get("message", ""),
        WAIT_S,
        "it is said why the newcomer is in quarantine",
    )
    seen = len(loops.notes(tmp_path / "steps"))
    until(lambda: len(loops.notes(tmp_path / "steps")) > seen + 5, WAIT_S, "the other trains on")
    one.stop()
    ended(one, tmp_path / "steps")


def test_too_few_replicas_wait_and_say_so_and_without_survivors_each_rank_has_its_own_state_again(
    trainer: Trainers, tmp_path: Path
) -> None:
    steps, hold = tmp_path / "steps", tmp_path / "steps.hold"
    one = trainer(replicas=(2, 2), config={"overflows": 2}, every=100_000)
    one.submit()
    until(lambda: len(loops.notes(steps)) > 20, WAIT_S, "both make steps")
    hold.touch()
    before = newest(steps)["generation"]
    os.kill(pid_of(steps, 1), signal.SIGKILL)
    until(
        lambda: "scaling.min_replicas" in one.progress().get("message", ""),
        WAIT_S,
        "it is said that it waits for more replicas",
    )
    hold.unlink()
    until(lambda: newest(steps)["generation"] > before, WAIT_S, "both make steps again")
    restored = until(lambda: one.progress().get("checkpoint"), WAIT_S, "what was restored is saved")

    def another() -> str:
        path = one.progress().get("checkpoint", "")
        return "" if path == restored else path

    one.save()
    path = until(another, WAIT_S, "rank 0 has saved")
    own = f"{Path(path).stem}.rank-00001*.json"
    until(lambda: list(Path(path).parent.glob(own)), WAIT_S, "rank 1 has saved what is its own")
    saved = int(path.removesuffix(".pt").rpartition("-")[2])
    until(lambda: newest(steps)["step"] >= saved + 4, WAIT_S, "steps are made after it")
    generation = newest(steps)["generation"]
    for pid in (pid_of(steps, 0), pid_of(steps, 1)):
        os.kill(pid, signal.SIGKILL)
    until(
        lambda: newest(steps)["generation"] > generation and newest(steps)["step"] >= saved + 3,
        WAIT_S,
        "new replicas make the steps after the checkpoint again",
    )
    one.stop()
    ended(one, steps)
    assert one.result().skipped_steps == 1, "the step whose loss was no number"
    noted = [note for note in loops.notes(steps) if note["step"] in range(saved, saved + 3)]
    draws: dict[int, set[tuple[int, int, float]]] = defaultdict(set)
    for note in noted:
        draws[note["generation"]].add((note["step"], note["rank"], note["draw"]))
    assert len(draws) == 2
    assert len(set(map(frozenset, draws.values()))) == 1, "each rank has its own random numbers"


def newest(steps: Path) -> dict[str, Any]:
    """Return the last step of the newest generation."""
    return max(loops.notes(steps), key=lambda one: (one["generation"], one["step"]))


def pid_of(steps: Path, rank: int) -> int:
    """Return the process of a rank of the newest generation."""
    ranks = [one for one in loops.notes(steps) if one["rank"] == rank]
    return int(max(ranks, key=lambda one: (one["generation"], one["step"]))["pid"])
