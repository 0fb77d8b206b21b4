"""``stoker port`` names the lines of a program that will not work, and nothing else."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from stoker.cli.local.port import check_file, fault_of, port

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """
    import ray
    import ray.util.state as state
    from ray import cloudpickle, ObjectRef
    from ray.exceptions import RayActorError
    from ray.util.placement_group import placement_group
    from ray.dag.input_node import InputNode

    ray.init(num_cpus=2, include_dashboard=False, logging_level="error")

    @ray.remote(num_cpus=1, fallback_strategy=[])
    class A:
        @ray.method(num_returns=2)
        def f(self):
            return ray.get_runtime_context().get_node_id(), ray.actor.exit_actor

    data, tune = {}, None
    data.train = tune
"""
BAD = """
    import ray
    from ray import tune, serve as served
    import ray.train
    from ray.util import spark
    import stoker.ray

    ray.init(bogus=1, storage="/x", runtime_env={"mpi": "x", "pip": []})
    stoker.ray.data.range(3)
    ray.nothing()

    @ray.remote(num_cpu=1, object_store_memory=5)
    def f(): ...
"""


def write(folder: Path, program: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    return path


def test_a_program_that_works_has_no_findings(tmp_path: Path) -> None:
    assert check_file(write(tmp_path, GOOD)) == []


def test_what_will_not_work_is_named_by_line(tmp_path: Path) -> None:
    findings = check_file(write(tmp_path, BAD))
    assert [(one.line, one.kind, one.name) for one in findings] == [
        (3, "error", "ray.serve"),
        (3, "error", "ray.tune"),
        (4, "error", "ray.train"),
        (5, "error", "ray.util.spark"),
        (8, "error", "init(bogus=)"),
        (8, "note", "init(storage=)"),
        (8, "error", "runtime_env['mpi']"),
        (9, "error", "ray.data.range"),
        (10, "error", "ray.nothing"),
        (12, "error", "remote(num_cpu=)"),
        (12, "note", "remote(object_store_memory=)"),
    ]
    assert all(one.text for one in findings)


def test_the_command_counts_and_exits(tmp_path: Path) -> None:
    write(tmp_path, BAD)
    done = CliRunner().invoke(port, [str(tmp_path)])
    assert done.exit_code == 1
    assert done.output.endswith("1 file: 9 errors, 2 notes\n")
    assert "program.py:10:1: error: ray.nothing: there is no such name" in done.output
    as_json = CliRunner().invoke(port, [str(tmp_path), "--json"])
    assert json.loads(as_json.output)[0]["kind"] == "error"
    write(tmp_path, GOOD)
    assert CliRunner().invoke(port, [str(tmp_path)]).exit_code == 0


def test_a_file_that_is_no_python_is_a_finding(tmp_path: Path) -> None:
    (one,) = check_file(write(tmp_path, "def f(:"))
    assert (one.kind, one.name) == ("error", "syntax")


@pytest.mark.parametrize("name", ["get", "util.ActorPool", "util.queue.Queue", "dag.InputNode", ""])
def test_names_that_are_there(name: str) -> None:
    assert fault_of(name) is None
