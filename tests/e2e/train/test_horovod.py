"""A loop in Horovod's elastic style on a live cluster: it shrinks, grows, loses a rank, and no step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
import stoker.train
from stoker.train import elastic
from tests.e2e._cluster import embedded
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 120.0
SAMPLES = 11
REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_ELASTIC_INTERVAL_S", "2")
        patch.setenv("STOKER_ELASTIC_MIN_INTERVAL_S", "0.5")
        with embedded(tmp_path_factory.mktemp("horovod"), num_cpus=4) as info:
            yield info


def loop(ctx: Any, config: dict[str, str]) -> dict[str, Any]:
    """Add 1 to a weight in each step, as the mean over all ranks, for whole epochs until it is enough."""
    import torch
    import torch.distributed as dist
    from torch import nn

    def total(value: float) -> float:
        told = torch.tensor([value])
        if elastic.size() > 1:
            dist.all_reduce(told)
        return float(told)

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)

    @elastic.run
    def train(state: Any) -> dict[str, Any]:
        while True:
            for number, _ in enumerate(list(state.sampler)):
                mean = total(1.0) / elastic.size()
                with torch.no_grad():
                    model.weight += mean
                state.steps += 1
                if elastic.size() not in state.seen[-1:]:
                    state.seen = [*state.seen, elastic.size()]
                if elastic.rank() == elastic.size() - 1:
                    stoker.kv.put(config["last"], f"{elastic.size()} {os.getpid()}")
                state.sampler.record_batch(number, 1)
                state.commit()
            if total(float(stoker.kv.get(config["enough"]) is not None)):
                return {
                    "steps": state.steps,
                    "weight": float(model.weight.detach()),
                    "seen": state.seen,
                }
            state.sampler.set_epoch(state.sampler.epoch + 1)

    sampler = elastic.ElasticSampler(range(SAMPLES))
    return train(elastic.TorchState(model, steps=0, seen=[], sampler=sampler))


def test_it_shrinks_grows_and_loses_a_rank(tmp_path: Path) -> None:
    keys = {"enough": "horovod/enough", "last": "horovod/last"}
    trainer = stoker.train.ElasticTrainer(
        loop,
        config=keys,
        scaling=stoker.train.Scaling(
            min_replicas=1, max_replicas=2, resources={"CPU": 1}, base_batch=32, adapt="replicas"
        ),
        checkpoint=str(tmp_path / "checkpoints"),
        name="horovod-style",
    )
    trainer.submit()

    def last_rank_of(world: int, but: int = 0) -> int:
        """The process of the last rank, once there are so many."""
        size, pid = (stoker.kv.get(keys["last"]) or b"0 0").split()
        return int(pid) if int(size) == world and int(pid) != but else 0

    until(lambda: last_rank_of(2), WAIT_S, "two replicas train")
    trainer.resize(1)
    until(lambda: last_rank_of(1), WAIT_S, "one replica trains")
    trainer.resize(2)
    pid = until(lambda: last_rank_of(2), WAIT_S, "two train again")
    os.kill(pid, signal.SIGKILL)
    until(lambda: last_rank_of(1) or last_rank_of(2, pid), WAIT_S, "it goes on without that rank")
    stoker.kv.put(keys["enough"], b"1")
    result = trainer.result(timeout_s=WAIT_S)
    assert result.error == ""
    assert result.value["weight"] == result.value["steps"] > 0
    seen = result.value["seen"]
    assert seen[seen.index(2) :][:3] == [2, 1, 2]
    assert result.generations >= 4
    assert result.ledger_ok, result.ledger_problems
    assert result.steps == result.value["steps"], "each commit is a step of the ledger"
    verified = subprocess.run(
        [sys.executable, "-m", "stoker.cli", "train", "verify", trainer.job_id, "--json"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    found = json.loads(verified.stdout)
    assert (verified.returncode, found["exact"]) == (0, True), verified.stderr
    assert {one["samples"] for one in found["epochs"]} == {SAMPLES}


def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(REPO / "examples/horovod_style.py"),
            "--epochs",
            "2",
            "--samples",
            "300",
        ],
        env={**os.environ, "STOKER_SESSION_ROOT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "after 2 epochs" in done.stdout
    assert "ledger exact: True" in done.stdout
