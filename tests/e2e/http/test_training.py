"""``stoker.train.report`` on a live cluster: by drivers, tasks, actors and ranks, to API and terminal."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import TYPE_CHECKING, Any

import pytest

import stoker
import stoker.train
from stoker.exceptions import NotFoundError
from tests.e2e._cluster import cli, driver, embedded, head, http, line_of
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with embedded(tmp_path_factory.mktemp("s"), num_cpus=2) as info:
        yield info


def job_id() -> str:
    return str(stoker.get_runtime_context().job_id)


def read(run: str, **query: Any) -> dict[str, Any]:
    """A run with its curves."""
    found: dict[str, Any] = stoker.runtime.current.runtime().job.http.call(
        "GET", f"/v1/training-runs/{job_id()}/{run}", reply=dict[str, Any], query=query
    )
    return found


def until_read(run: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """A run with its curves, once it is as wanted."""

    def there() -> dict[str, Any] | None:
        try:
            found = read(run)
        except NotFoundError:
            return None
        return found if holds(found) else None

    return until(there, WAIT_S, f"the reports of run {run} are there")


def until_step(run: str, step: int) -> dict[str, Any]:
    return until_read(run, lambda found: found["run"]["newest_step"] == step)


@stoker.remote
def train(run: str, first: int, last: int) -> None:
    for step in range(first, last):
        stoker.train.report(step, run=run, loss=1.0 / (step + 1), lr=3)


def test_all_that_a_task_reports_is_there_though_its_worker_ends_with_it() -> None:
    stoker.get(train.options(max_calls=1).remote("ends", 0, 2500))
    found = until_step("ends", 2499)
    assert found["run"]["newest"] == {"loss": 1 / 2500, "lr": 3.0}
    assert (found["run"]["first_step"], found["run"]["last_step"]) == (0, 2499)
    assert found["run"]["steps_per_s"] > 0
    assert found["steps_per_point"] == 5
    loss = found["metrics"]["loss"]
    assert len(loss["step"]) == 500
    assert (loss["max"][0], loss["min"][0]) == (1.0, 1 / 5)
    assert found["metrics"]["lr"]["mean"] == [3.0] * 500


def test_a_driver_that_ends_at_once_leaves_its_reports(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    program = """
        import stoker, stoker.train
        stoker.init()
        print("JOB", stoker.get_runtime_context().job_id, flush=True)
        stoker.train.report(7, loss=0.5)
    """
    with head(tmp_path_factory.mktemp("h"), num_cpus=1) as other:
        with driver(other, program) as process:
            job = line_of(process, "JOB")
            process.wait(WAIT_S)

        def runs() -> list[dict[str, Any]]:
            page = http(other).call("GET", "/v1/training-runs", reply=dict[str, Any])
            return list(page["items"])

        (run,) = until(runs, WAIT_S, "the run is there")
        assert (run["job_id"], run["newest"], run["newest_step"]) == (job, {"loss": 0.5}, 7)
        shown = cli(other, "train", "runs")
        assert "loss 0.5" in shown.stdout and "default" in shown.stdout
        (told,) = json.loads(cli(other, "train", "runs", job, "--json").stdout)["items"]
        assert told == run


def test_actors_report_from_coroutines_and_threads() -> None:
    @stoker.remote
    class Trainer:
        async def steps(self, first: int) -> None:
            for step in range(first, first + 50):
                stoker.train.report(step, run="actor", loss=float(step))
                await asyncio.sleep(0)

        def thread(self) -> None:
            def work() -> None:
                stoker.train.report(1000, run="actor", loss=-1.0)

            one = threading.Thread(target=work)
            one.start()
            one.join()

    trainer = Trainer.remote()
    stoker.get([trainer.steps.remote(0), trainer.steps.remote(50)])
    stoker.get(trainer.thread.remote())
    found = until_step("actor", 1000)
    points = dict(
        zip(found["metrics"]["loss"]["step"], found["metrics"]["loss"]["mean"], strict=True)
    )
    assert found["steps_per_point"] == 3
    assert sum(3 * mean for step, mean in points.items() if step < 99) + 99.0 == sum(range(100))


def test_one_rank_of_a_group_reports() -> None:
    def step() -> None:
        import os

        if os.environ["RANK"] == "0":
            stoker.train.report(3, run="ranks", world=int(os.environ["WORLD_SIZE"]))

    stoker.train.run(step, workers=2)
    assert until_step("ranks", 3)["run"]["newest"] == {"world": 2.0}


def test_what_is_no_number_stays_what_it_is() -> None:
    for step, value in enumerate((1.0, math.nan, math.inf, -math.inf)):
        stoker.train.report(step, run="odd", loss=value)
    loss = until_step("odd", 3)["metrics"]["loss"]
    assert loss["mean"] == [1.0, None, None, None]
    assert loss["max"] == [1.0, None, "inf", "-inf"]
    assert loss["nans"] == [0, 1, 0, 0]
    assert read("odd")["run"]["newest"] == {"loss": "-inf"}
    stoker.train.report(4, run="odd", loss=math.nan)
    assert until_step("odd", 4)["run"]["newest"] == {"loss": "nan"}


def test_a_step_that_is_done_again_replaces_the_former() -> None:
    stoker.get(train.remote("again", 0, 20))
    until_step("again", 19)
    for step in range(10, 15):
        stoker.train.report(step, run="again", loss=9.0)
    found = until_step("again", 14)
    assert found["metrics"]["loss"]["mean"][9:16] == [0.1, 9.0, 9.0, 9.0, 9.0, 9.0, 1 / 16]
    assert found["run"]["last_step"] == 19


def test_the_run_of_a_detached_actor_is_that_of_the_job_that_made_it() -> None:
    @stoker.remote
    class Keeps:
        def step(self) -> None:
            stoker.train.report(1, run="detached", loss=1.0)

    keeps = Keeps.options(name="keeps", lifetime="detached").remote()
    try:
        stoker.get(keeps.step.remote())
        assert until_step("detached", 1)["run"]["job_id"] == job_id()
    finally:
        stoker.kill(keeps)
