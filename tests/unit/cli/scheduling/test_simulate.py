"""``stoker simulate``: which program runs, with what, and combinations that mean nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from stoker.cli.scheduling.simulate import simulate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The programs that took this one's place: what follows the path of Python."""
    programs: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, program: programs.append(program[2:]))
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")
    return programs


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cluster.toml", "trace.csv", "a.csv", "b.csv"):
        (tmp_path / name).write_text("")
    (tmp_path / "profiles").mkdir()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("files")
def test_a_trace_is_run_by_the_scheduler(started: list[list[str]]) -> None:
    arguments = ["--cluster", "cluster.toml", "--trace", "trace.csv", "--policy", "fair", "fifo"]
    result = CliRunner().invoke(simulate, [*arguments, "--seed", "0", "--json"])
    assert result.exit_code == 0, result.output
    assert started == [
        ["stoker_scheduler.simulation", "--cluster=cluster.toml", "--trace=trace.csv", "--seed=0",
         "--policy=fair", "--policy=fifo", "--json"]
    ]  # fmt: skip


@pytest.mark.usefixtures("files")
def test_several_workloads_follow_one_option_or_several(started: list[list[str]]) -> None:
    short = ["--profiles", "profiles", "--workload", "a.csv", "b.csv", "--restart-of", "m=5"]
    long = [
        "--profiles",
        "profiles",
        "--workload",
        "a.csv",
        "--workload",
        "b.csv",
        "--restart-of",
        "m=5",
    ]
    for arguments in (short, long):
        assert CliRunner().invoke(simulate, arguments).exit_code == 0
    assert started[0] == started[1]
    assert started[0] == [
        "stoker_scheduler.simulation.elastic", "--profiles=profiles", "--workload=a.csv",
        "--workload=b.csv", "--restart-of=m=5",
    ]  # fmt: skip


@pytest.mark.usefixtures("files")
def test_a_flag_goes_on_without_a_value(started: list[list[str]]) -> None:
    arguments = ["--profiles", "profiles", "--workload", "a.csv", "--declare-epochs"]
    assert CliRunner().invoke(simulate, arguments).exit_code == 0
    assert "--declare-epochs" in started[0]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --cluster and --trace; --cluster is missing"),
        (["--trace", "trace.csv"], "--cluster is missing"),
        (["--workload", "a.csv"], "give --profiles and --workload; --profiles is missing"),
        (["--profiles", "profiles"], "--workload is missing"),
        (
            ["--profiles", "profiles", "--workload", "a.csv", "--jitter", "0.1"],
            "--jitter does not go with --profiles",
        ),
        (
            ["--cluster", "cluster.toml", "--trace", "trace.csv", "--gpus-per-node", "4"],
            "--gpus-per-node does not go with --cluster",
        ),
        (
            ["--cluster", "cluster.toml", "--trace", "trace.csv", "--declare-epochs"],
            "--declare-epochs does not go with --cluster",
        ),
    ],
)
def test_what_means_nothing_is_refused(
    started: list[list[str]], arguments: list[str], says: str
) -> None:
    result = CliRunner().invoke(simulate, arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not started
