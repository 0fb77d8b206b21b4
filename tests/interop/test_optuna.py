"""Optuna's trials in tasks: ``make interop``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

optuna = pytest.importorskip("optuna", reason="optuna is not installed: make interop")

import stoker
from tests.interop.calls import square

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    stoker.init(num_cpus=2, log_to_driver=False)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    stoker.shutdown()


def test_trials_are_asked_here_and_run_in_workers() -> None:
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    space = {"x": optuna.distributions.IntDistribution(-10, 10)}
    with stoker.Executor() as executor:
        for _ in range(5):
            trials = [study.ask(space) for _ in range(4)]
            futures = [executor.submit(square, trial.params["x"]) for trial in trials]
            for trial, future in zip(trials, futures, strict=True):
                study.tell(trial, future.result(40))
    assert len(study.trials) == 20 and study.best_value <= 25


def test_an_objective_of_threads_waits_for_calls_in_workers() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    with stoker.Executor() as executor:

        def objective(trial: optuna.Trial) -> int:
            return executor.submit(square, trial.suggest_int("x", -10, 10)).result(40)

        study.optimize(objective, n_trials=12, n_jobs=3)
    assert len(study.trials) == 12
