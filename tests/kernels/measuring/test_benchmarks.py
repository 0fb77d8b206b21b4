"""The kernel benchmarks run, compare like with like, and write what they measured."""

from __future__ import annotations

import csv
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.kernels.__main__ import main, parser
from benchmarks.kernels.peers import PEERS, providers
from stoker_kernels.workloads import Workload, workloads

ON_GPU = Path(__file__).parents[3] / "scripts" / "on-gpu"


def test_one_op_from_end_to_end(tmp_path: Path) -> None:
    table, plots = tmp_path / "results.csv", tmp_path / "plots"
    arguments = ["add_rms_norm", "--device", "cpu", "--small", "--dtype", "float32"]
    for _ in range(2):
        assert main([*arguments, "--csv", str(table), "--plots", str(plots)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 3  # runs, providers, modes; one header
    assert {(r["provider"], r["mode"]) for r in rows} == {
        (provider, mode)
        for provider in ("stoker", "eager")
        for mode in ("forward", "backward", "full")
    }
    for row in rows:
        assert float(row["low_ms"]) <= float(row["median_ms"]) <= float(row["high_ms"])
        assert float(row["roofline"]) > 0
    assert (plots / "add_rms_norm.svg").stat().st_size > 0


def test_every_workload_has_a_peer_and_every_peer_a_workload() -> None:
    assert set(PEERS) == set(workloads())


DRAWS = {"dropout_add_layer_norm", "attention_dropout"}  # other random numbers than torch's
SELECTS = {
    "topk_compress",
    "topk_compress_momentum",
}  # the largest to within 1/16, in another order
PACKS = {"onebit_compress"}  # torch has no packed bits
ROUNDS = {
    "fp8_linear",
    "fp8_linear_block",
}  # the peers multiply in 16 bits, or round by other scales


@pytest.mark.parametrize(
    "name", sorted(set(PEERS) & set(workloads()) - DRAWS - SELECTS - PACKS - ROUNDS)
)
def test_peers_compute_the_same(name: str) -> None:
    work: Workload = workloads()[name]
    results = []
    for provider, function in providers(work, "cpu").items():
        if provider in ("sdpa_cudnn", "sdpa_efficient"):
            continue  # these have no CPU implementation
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            inputs = work.inputs("cpu", torch.float32, **work.small)
            results.append((provider, tree_leaves(function(**inputs))))
    (_, ours), *others = results
    for provider, theirs in others:  # ours may return statistics before the rest
        for a, b in zip(ours[-len(theirs) :], theirs, strict=True):
            torch.testing.assert_close(
                a, b, rtol=1e-4, atol=1e-5, check_dtype=False, msg=lambda m, p=provider: f"{p}: {m}"
            )


@pytest.mark.parametrize("name", ["adamw", "topk_compress", "swiglu"])
def test_a_provider_runs_again_and_again(name: str, tmp_path: Path) -> None:
    """Optimizers keep their states from call to call, for one set of parameters after another."""
    table = tmp_path / "results.csv"
    for _ in range(2):
        assert main([name, "--device", "cpu", "--small", "--csv", str(table)]) == 0
    with table.open() as file:
        timed = {row["provider"] for row in csv.DictReader(file)}
    assert timed == {"stoker", *PEERS[name]}


def test_chosen_sizes_and_floors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "results.csv"
    sizes = ["--size", "rows=4", "--size", "columns=32"]
    common = ["rms_norm", "--device", "cpu", "--dtype", "float32", "--csv", str(table)]
    assert main([*common, *sizes]) == 0
    with table.open() as file:
        assert {row["sizes"] for row in csv.DictReader(file)} == {"rows=4 columns=32"}
    with pytest.raises(SystemExit):
        main([*common, "--size", "rows"])
    assert "expected NAME=N" in capsys.readouterr().err
    assert main(["rms_norm", "attention", "--floors"]) == 0
    # 2 x 16384 x 4096 bf16 values over 4.8 TB/s; 2 x 4 x 16 x 4096^2 x 128 operations over 989 TFLOP/s.
    shown = capsys.readouterr().out
    assert "0.056" in shown
    assert "0.278" in shown


def test_an_unknown_op_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rms_nrom"])
    assert "no op 'rms_nrom': there are" in capsys.readouterr().err


def test_what_runs_on_a_gpu_machine_is_there_and_comes_in_order_of_worth(tmp_path: Path) -> None:
    sections = runpy.run_path(str(ON_GPU))["sections"]
    found = sections(tmp_path, dry=False, cluster=True)
    names = [name for name, *_ in found]
    assert names[:4] == ["machine", "tests", "cluster tests", "attention"]
    for _, most_s, command in found:
        assert 0 < most_s <= 260
        if command[:2] == ["-m", "benchmarks.kernels"]:
            asked = parser().parse_args(command[2:])
            assert asked.ops and set(asked.ops) <= set(workloads())
            assert asked.csv == tmp_path / "results.csv"
        for path in (word for word in command if word.startswith("tests/")):
            assert (ON_GPU.parents[1] / path).exists()


def test_without_time_every_section_is_told_and_it_fails(tmp_path: Path) -> None:
    command = [sys.executable, str(ON_GPU), str(tmp_path), "--dry", "--seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    told = [json.loads(line) for line in (tmp_path / "sections.jsonl").read_text().splitlines()]
    assert {one["result"] for one in told} == {"no time left"}
    assert [one["section"] for one in told][:2] == ["machine", "tests"]
    assert "compression: no time left" in done.stdout
