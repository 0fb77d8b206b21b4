"""Inputs that cannot be: each is refused with the file, the line, and what to do."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from stoker_scheduler.simulation.elastic.__main__ import main
from stoker_scheduler.simulation.elastic.profiles import read_profiles, smallest_rotation
from stoker_scheduler.simulation.elastic.synthetic import write
from stoker_scheduler.simulation.elastic.workloads import read_workload
from stoker_scheduler.simulation.inputs import InputError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, jobs=6, hours=0.2)
    return tmp_path


def simulate(folder: Path, *more: str) -> Result:
    arguments = ["--profiles", str(folder), "--workload", str(folder / "workload.csv")]
    return CliRunner().invoke(main, [*arguments, "--nodes", "4", *more])


def change(path: Path, line: int, column: str, value: str) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[line - 2][column] = value
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_one_table_and_one_line_of_json(folder: Path) -> None:
    shown = simulate(folder, "--policy", "stoker", "--policy", "fifo")
    assert shown.exit_code == 0, shown.output
    assert "completion (JCT), mean" in shown.stdout
    printed = simulate(folder, "--json", "--policy", "stoker", "--policy", "tiresias")
    (found,) = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [one["policy"] for one in found["results"]] == ["stoker", "tiresias"]
    for one in found["results"]:
        assert one["workload"] == "workload"
        assert 0 < one["mean_jct_s"] <= one["p99_jct_s"] <= one["makespan_s"]


def test_every_figure_can_be_computed_from_the_log(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert simulate(folder, "--out", str(out)).exit_code == 0
    with (out / "workload.stoker.jobs.csv").open(newline="") as file:
        jobs = list(csv.DictReader(file))
    times = [float(job["finished_s"]) - float(job["submitted_s"]) for job in jobs]
    (result,) = json.loads((out / "figures.json").read_text())["results"]
    assert sum(times) / len(times) == pytest.approx(result["mean_jct_s"])
    with (out / "workload.stoker.rounds.csv").open(newline="") as file:
        rounds = list(csv.DictReader(file))
    gpu_s = sum(60 * int(row["replicas"]) for row in rounds)
    assert all(0 < float(row["efficiency"]) <= 1 for row in rounds)
    assert gpu_s / 3600 == pytest.approx(result["gpu_hours"])
    assert sum(float(job["gpu_s"]) for job in jobs) == gpu_s


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("time", "-1", "time is '-1': it must be a number from 0 on"),
        ("time", "1.5", "time is '1.5', no whole number"),
        ("time", "0", "before"),
        ("application", "smaller", "did you mean 'small'"),
        ("num_replicas", "0", "num_replicas is '0'"),
        ("num_replicas", "17", "the cluster has 16 GPUs: .* would never end"),
        ("batch_size", "1", "batch_size is 1, not"),
        ("name", "", ""),
    ],
)
def test_a_workload_with_a_wrong_field(folder: Path, column: str, value: str, says: str) -> None:
    path = folder / "workload.csv"
    models = read_profiles(folder)
    if column == "name":
        value, says = read_workload(path, models, 16)[0].name, "as in line 2"
    change(path, 4, column, value)
    with pytest.raises(InputError, match=says) as caught:
        read_workload(path, models, 16)
    assert f"{path}:4: " in str(caught.value)


def test_missing_columns_and_files_are_named(folder: Path) -> None:
    (folder / "workload.csv").write_text("name,time\na,1\n")
    shown = simulate(folder)
    assert shown.exit_code == 1
    assert "there is no column 'application', 'num_replicas', 'batch_size'" in shown.stderr
    (folder / "traces/small/scalability.csv").unlink()
    assert "scalability.csv: No such file" in simulate(folder).stderr
    with pytest.raises(InputError, match="no folder traces/"):
        read_profiles(folder / "traces/small")


@pytest.mark.parametrize(
    ("file", "column", "value", "says"),
    [
        ("placements.csv", "step_time", "nan", "step_time is 'nan'"),
        ("placements.csv", "sync_time", "9999", "not less than step_time"),
        ("placements.csv", "placement", "10", "a digit from 1 to 9 for each node"),
        ("validation-64.csv", "progress", "1e9", "progress falls"),
        ("validation-64.csv", "grad_var", "-2", "grad_var is '-2'"),
    ],
)
def test_profiles_with_a_wrong_field(
    folder: Path, file: str, column: str, value: str, says: str
) -> None:
    change(folder / "traces/small" / file, 3, column, value)
    with pytest.raises(InputError, match=says):
        read_profiles(folder)


def test_a_hole_names_placement_and_batch(folder: Path) -> None:
    path = folder / "traces/small/placements.csv"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("1,")]
    path.write_text("\n".join(lines) + "\n")
    (folder / "traces/small/scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n16,64,16,1.0,0.1\n"
    )
    model = read_profiles(folder)["small"]
    with pytest.raises(
        InputError, match="small have no step time of placement 1 with a local batch"
    ):
        model.step_time((1,), 16)


def test_epochs_of_different_number_are_refused(folder: Path) -> None:
    path = folder / "traces/small/validation-128.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(InputError, match=r"\[9, 10\] epochs"):
        read_profiles(folder)


def test_options_that_name_nothing(folder: Path) -> None:
    assert "did you mean 'stoker'" in simulate(folder, "--policy", "stokr").stderr
    assert "there is no model 'bert'" in simulate(folder, "--restart-of", "bert=3").stderr
    assert (
        "there are two of the name 'a'"
        in simulate(folder, "--gpu-type", "a:2x4:1", "--gpu-type", "a:2x4:2").stderr
    )
    for wrong in ("a100", "a:0x4:1", "a:4x4:0", "a:4x65:1", "a:4x4:-1"):
        assert f"--gpu-type: {wrong!r} must be" in simulate(folder, "--gpu-type", wrong).stderr
    assert "must be MODEL=SECONDS" in simulate(folder, "--restart-of", "small=x").stderr


def test_a_ring_has_one_name() -> None:
    assert smallest_rotation((3, 4, 1)) == (1, 3, 4)
    assert smallest_rotation((1, 4, 3)) == (1, 4, 3)
