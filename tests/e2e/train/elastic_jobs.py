"""Elastic jobs for the tests of this folder: trainers on a cluster of four CPUs, and waits for them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from stoker.jobs import JobSubmissionClient
from stoker.runtime import current
from stoker.train import Checkpoint, ElasticTrainer, Failure, Scaling
from tests.e2e.train import elastic_loops as loops
from tests.services import until

if TYPE_CHECKING:
    from pathlib import Path

    from stoker_train.elastic.policies import Policy

WAIT_S = 90.0
TRAINS = "RUNNING"


class Trainers:
    """Makes trainers whose steps are noted in ``folder / "steps"``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "steps").mkdir()
        self._made: list[ElasticTrainer] = []

    def __call__(
        self,
        loop: Any = loops.noted,
        replicas: tuple[int, int] = (1, 2),
        *,
        config: dict[str, Any] | None = None,
        policies: tuple[Policy, ...] = (),
        every: int = 10,
        hang_s: float = 60.0,
        **scaling: Any,
    ) -> ElasticTrainer:
        """Make a trainer; ``scaling`` are more options of Scaling."""
        limits = {"min_replicas": replicas[0], "max_replicas": replicas[1]}
        given = {"resources": {"CPU": 1}, "base_batch": 16, "interval_s": 1000.0}
        made = ElasticTrainer(
            loop,
            config={"folder": str(self._folder / "steps"), **(config or {})},
            scaling=Scaling(**{**limits, **given, **scaling}),
            policies=policies,
            checkpoint=Checkpoint(str(self._folder / "checkpoints"), every=every, commit_every=5),
            failure=Failure(hang_s=hang_s),
        )
        self._made.append(made)
        return made

    def made(self, trainer: ElasticTrainer) -> None:
        """Have the job of a trainer that a test made itself be stopped, too."""
        self._made.append(trainer)

    def stop(self) -> None:
        """End the jobs that go on."""
        for one in self._made:
            if one.job_id:
                client().stop_job(one.job_id)
                client().wait(one.job_id, timeout_s=WAIT_S)


def client() -> JobSubmissionClient:
    """The jobs of this test's cluster."""
    identity = current.runtime().identity
    return JobSubmissionClient(identity.gcs_url, token=identity.credential.token)


def has(trainer: ElasticTrainer, replicas: int) -> None:
    """Wait until it trains with so many replicas."""
    until(
        lambda: (
            (now := trainer.progress()).get("replicas") == replicas and now.get("phase") == TRAINS
        ),
        WAIT_S,
        f"it trains with {replicas} replicas",
    )


def ended(trainer: ElasticTrainer, steps: Path) -> dict[int, list[dict[str, Any]]]:
    """Wait for the end; returns what the ranks noted, by step, after a look at what must always hold."""
    result = trainer.result(WAIT_S)
    assert not result.error
    assert result.ledger_ok, result.ledger_problems
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for note in loops.notes(steps):
        if note["step"] < result.steps:  # later ones were lost, and not made again before the end
            by_step[note["step"]].append(note)
    for step, noted in by_step.items():
        # What was made again after a loss counts as it was made at last.
        newest = max(one["generation"] for one in noted)
        by_step[step] = noted = [one for one in noted if one["generation"] == newest]
        for name in ("epoch", "world", "batch", "lr", "sync"):
            assert len({repr(one[name]) for one in noted}) == 1, f"{name} of step {step}: {noted}"
    assert sorted(by_step) == list(range(result.steps)), "each step was noted"
    epochs: dict[int, list[int]] = defaultdict(list)
    partly = {max(epoch["epoch"] for one in by_step.values() for epoch in one)}
    for step, noted in by_step.items():
        epoch, generation = noted[0]["epoch"], noted[0]["generation"]
        epochs[epoch] += [number for one in noted for number in one["seen"]]
        if [one["rank"] for one in noted] != list(range(noted[0]["world"])):
            after = by_step.get(step + 1, ())
            assert all(one["generation"] > generation for one in after), (noted, after)
            partly.add(epoch)  # a rank was killed before it had noted its last step
    for epoch, seen in epochs.items():
        assert len(seen) == len(set(seen)), f"a sample of epoch {epoch} was used twice"
        assert epoch in partly or set(seen) == set(range(96)), f"epoch {epoch} is not whole"
    return dict(by_step)
