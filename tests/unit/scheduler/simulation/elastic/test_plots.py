"""Plots: the files that a study leaves, and mean completion times by load."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from stoker_scheduler.simulation.elastic import __main__ as program
from stoker_scheduler.simulation.elastic.synthetic import write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Profiles, and two workloads of one name in two folders, one of twice the load."""
    write(tmp_path, jobs=4, hours=0.2)
    lines = (tmp_path / "workload.csv").read_text().splitlines()
    for name, jobs in (("low", lines[:3]), ("high", lines)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "workload.csv").write_text("\n".join(jobs) + "\n")
    return tmp_path


def simulate(folder: Path, out: Path, *workloads: str) -> str:
    arguments = ["--profiles", str(folder), "--nodes", "4", "--out", str(out)]
    for name in workloads:
        arguments += ["--workload", str(folder / name / "workload.csv")]
    shown = CliRunner().invoke(program.main, arguments)
    assert shown.exit_code == 0, shown.output
    return shown.stderr


def test_a_study_leaves_its_plots_and_two_loads_one_of_both(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    simulate(folder, out, "low", "high")
    drawn = {path.name for path in out.glob("*.svg")}
    kinds = ("allocations", "jct", "policy", "batch")
    assert drawn == {
        "jct-by-load.svg",
        *(f"{load}-workload.stoker.{kind}.svg" for load in ("low", "high") for kind in kinds),
    }
    results = json.loads((out / "figures.json").read_text())["results"]
    assert [(one["workload"], one["jobs"], one["jobs_per_h"]) for one in results] == [
        ("low-workload", 2, 2.0),
        ("high-workload", 4, 4.0),
    ]
    one = tmp_path / "one"
    simulate(folder, one, "low")
    assert not (one / "jct-by-load.svg").exists()


def test_without_matplotlib_there_are_none_and_it_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "out"
    assert "no plots: matplotlib is not installed" in simulate(folder, out, "low")
    assert not list(out.glob("*.svg"))
    assert (out / "workload.stoker.jobs.csv").exists()
