"""The training example on a real cluster: the same curve however it is split, stopped or resumed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import ConflictError, GetTimeoutError
from stoker.jobs import JobState, JobSubmissionClient

if TYPE_CHECKING:
    from collections.abc import Iterator

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("numpy") is None:
    pytest.skip("needs torch: pip install stoker[train]", allow_module_level=True)

RUN_S = 200.0
pytestmark = pytest.mark.timeout(RUN_S + 40.0)

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
TINY = [
    *("--layers", "1", "--heads", "1", "--dim", "32", "--batch", "8", "--block", "32"),
    *("--steps", "8", "--warmup", "2", "--timeout-s", "60", "--num-cpus-per-worker", "1"),
]


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The example as a module, on a cluster whose workers can import it."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        stoker.init(num_cpus=2, log_to_driver=False, runtime_env={"working_dir": str(EXAMPLES)})
        yield importlib.import_module("train_gpt")
    finally:
        stoker.shutdown()
        sys.path.remove(str(EXAMPLES))


def _train(example: Any, out: Path, *options: str) -> dict[str, Any]:
    args = example.arguments().parse_args([*TINY, "--out", str(out), *options])
    metrics: dict[str, Any] = example.run(example.config_of(args), args)
    return metrics


def _kill_one_trainer() -> None:
    reply = stoker.runtime.current.runtime().job.http.call(
        "GET", "/v1/actors", reply=dict[str, Any], query={"limit": 1000}
    )
    living = [a for a in reply["items"] if a["class_name"] == "Trainer" and a["state"] == "ALIVE"]
    os.kill(max(living, key=lambda a: a["created_at_s"])["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def two_workers(example: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An uninterrupted run of two workers: its metrics, and where it kept them."""
    return _train(example, tmp_path_factory.mktemp("two"), "--workers", "2")


def test_two_workers_and_one_have_the_same_curve(
    example: Any, two_workers: dict[str, Any], tmp_path: Path
) -> None:
    one = _train(example, tmp_path, "--workers", "1")
    assert len(one["losses"]) == 8
    assert two_workers["losses"] == pytest.approx(one["losses"], abs=1e-4)
    assert two_workers["validation_loss"] == pytest.approx(one["validation_loss"], abs=1e-4)
    assert one["losses"][-1] < one["losses"][0]


def test_a_resumed_run_goes_on_as_if_it_was_never_stopped(
    example: Any, two_workers: dict[str, Any], tmp_path: Path
) -> None:
    stopped = _train(example, tmp_path, "--stop-after", "5")
    assert len(stopped["losses"]) == 5
    resumed = _train(example, tmp_path, "--resume")
    assert resumed["losses"] == pytest.approx(two_workers["losses"], abs=1e-6)
    assert resumed["validation_loss"] == pytest.approx(two_workers["validation_loss"], abs=1e-6)


def test_compressed_exchange_trains_and_resumes_with_what_it_held_back(
    example: Any, two_workers: dict[str, Any], tmp_path: Path
) -> None:
    options = ("--workers", "2", "--compress", "onebit")
    whole = _train(example, tmp_path / "whole", *options)
    assert whole["losses"][0] == pytest.approx(two_workers["losses"][0], abs=1e-5)
    assert whole["losses"] != two_workers["losses"]
    assert whole["losses"][-1] < whole["losses"][0]
    _train(example, tmp_path / "parts", *options, "--stop-after", "5")
    resumed = _train(example, tmp_path / "parts", *options, "--resume")
    assert resumed["losses"] == pytest.approx(whole["losses"], abs=1e-6)


def test_it_keeps_a_curve_and_a_checkpoint(two_workers: dict[str, Any]) -> None:
    assert Path(two_workers["checkpoint"]).stat().st_size > 10_000
    assert len(two_workers["samples"]) == 3
    if two_workers["curve"]:
        assert Path(two_workers["curve"]).read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_of_another_run_is_refused(example: Any, tmp_path: Path) -> None:
    _train(example, tmp_path, "--workers", "1", "--steps", "1")
    with pytest.raises(example.TrainingFailed, match=r"worker 0 of 1 .* another run"):
        _train(example, tmp_path, "--workers", "1", "--steps", "2", "--resume")


def test_a_batch_that_cannot_be_split_is_refused(example: Any, tmp_path: Path) -> None:
    with pytest.raises(example.TrainingFailed, match="--batch 7 cannot be split evenly into 2"):
        _train(example, tmp_path, "--workers", "1", "--batch", "7")


def test_the_death_of_a_worker_is_named_and_ends_the_run(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = example.Progress.show

    def kill_after_three(progress: Any, report: dict[str, Any]) -> None:
        show(progress, report)
        if report["step"] == 3:
            _kill_one_trainer()

    monkeypatch.setattr(example.Progress, "show", kill_after_three)
    with pytest.raises(example.TrainingFailed, match=r"(?s)worker [01] of 2 failed: .*SIGKILL"):
        _train(example, tmp_path, "--workers", "2", "--steps", "100000")


def test_it_runs_as_a_submitted_job(example: Any, tmp_path: Path) -> None:
    connected = stoker.runtime.current.runtime()
    client = JobSubmissionClient(connected.identity.gcs_url, connected.identity.token)
    job_id = client.submit_job(
        entrypoint=shlex.join(["python", "train_gpt.py", *TINY, "--out", str(tmp_path)]),
        runtime_env={"working_dir": str(EXAMPLES)},
    )
    job = client.wait(job_id, timeout_s=RUN_S)
    log = "\n".join(line.text for line in client.tail_job_logs(job_id))
    assert (job.state, job.exit_code) == (JobState.SUCCEEDED, 0), log
    assert "step    8/8" in log
    assert (tmp_path / "checkpoint.pt").exists()


def _joiner() -> Any:
    class Joiner:
        def ready(self) -> None:
            for name in ("torch.distributed", "stoker.train"):
                importlib.import_module(name)  # so that none comes late for that

        def join(self, name: str, rank: int, world_size: int, timeout_s: float) -> list[str]:
            stoker.train.init_process_group(
                name, rank, world_size, backend="gloo", timeout_s=timeout_s
            )
            stoker.train.destroy_process_group()
            return stoker.kv.keys("train/")

    return stoker.remote(runtime_env={"preload": ["torch"]})(Joiner)


def test_the_rendezvous_names_the_ranks_that_are_missing(example: Any) -> None:
    joiners = [_joiner().remote() for _ in range(2)]
    stoker.get([joiner.ready.remote() for joiner in joiners], timeout=40)
    refs = [joiners[0].join.remote("gap", 0, 4, 2.0), joiners[1].join.remote("gap", 2, 4, 2.0)]
    for ref in refs:
        with pytest.raises(GetTimeoutError, match=r"ranks \[1, 3\] did not come") as caught:
            stoker.get(ref, timeout=40)
        assert caught.value.extra["missing_ranks"] == [1, 3]


def test_a_rank_is_taken_once_and_a_group_that_met_leaves_no_keys(example: Any) -> None:
    joiners = [_joiner().remote() for _ in range(3)]
    first = joiners[0].join.remote("pair", 0, 2, 30.0)
    stoker.kv.wait(f"train/{stoker.get_runtime_context().job_id}/pair/0/rank/0", timeout=30)
    with pytest.raises(ConflictError, match="rank 0 of group 'pair'"):
        stoker.get(joiners[1].join.remote("pair", 0, 2, 30.0), timeout=40)
    stoker.get([first, joiners[2].join.remote("pair", 1, 2, 30.0)], timeout=40)
    assert stoker.kv.keys(f"train/{stoker.get_runtime_context().job_id}/pair/") == []


def test_a_group_that_is_left_leaves_no_threads(example: Any) -> None:
    """DDP imports modules that would keep the group, and its threads abort the process at exit."""

    @stoker.remote(runtime_env={"preload": ["torch"]})
    def threads_left() -> tuple[int, int]:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        def gloo_threads() -> int:
            names = []
            for path in Path("/proc/self/task").glob("*/comm"):
                with contextlib.suppress(OSError):  # it has ended
                    names.append(path.read_text())
            return sum(name.startswith("pt_gloo") for name in names)

        stoker.train.init_process_group("alone", 0, 1, backend="gloo", timeout_s=30.0)
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()
        before = gloo_threads()
        del model
        stoker.train.destroy_process_group()
        return before, gloo_threads()

    before, after = stoker.get(threads_left.remote(), timeout=60)
    assert before > 0
    assert after == 0


def test_the_demo_tells_of_its_job_and_fails_above_its_target(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--steps", "2", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "not below 2.5 nats per byte" in done.stderr
    for expected in ("SUCCEEDED", "Trainer.train", "FINISHED", "ALIVE", "curl -s -H", "GET /v1/"):
        assert expected in done.stdout
    token = "Bearer $(cat"
    assert token in done.stdout
