"""Kernels as tasks see them: callable, compiled before the task starts, placed where they are warm, tuned.

No GPU is needed: the cluster declares one, tasks run the CPU path, and code is compiled for sm_90.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stoker
from stoker.exceptions import BadRequestError, RuntimeEnvSetupError
from stoker.local.cluster import spawn_node
from stoker.train import autotune, warm
from tests.e2e import _cluster
from tests.e2e.conftest import get
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch")
if (
    find_spec("triton") is None
):  # not imported: tests/kernels loads it interpreted, in this process too
    pytest.skip("triton is not installed", allow_module_level=True)

COLD_S = 180.0
pytestmark = pytest.mark.timeout(2 * COLD_S)
NORM = {"op": "rms_norm", "dtype": "float32", "columns": 512}
STEPS = "tests.e2e.train.kernels.kernel_steps"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("k")


@pytest.fixture(scope="module", autouse=True)
def head(folder: Path) -> Iterator[Any]:
    """A node with two logical GPUs for which sm_90 is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_KERNEL_ARCH", "90")
        patch.setenv("STOKER_KERNEL_CACHE_DIR", str(folder / "near"))
        with _cluster.head(folder, num_cpus=2, num_gpus=2) as cluster:
            stoker.init(cluster.info.gcs_url, token=cluster.info.token, log_to_driver=False)
            try:
                yield cluster
            finally:
                stoker.shutdown()


@stoker.remote(num_gpus=1)
def variables() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if "TRITON" in name or "TUNING" in name
    }


@stoker.remote(num_gpus=1)
def lookups(specs: list[Any]) -> list[bool]:
    from tests.e2e.train.kernels import kernel_steps

    return kernel_steps.lookups(specs)


@stoker.remote(num_gpus=1)
def call_every_op() -> list[str]:
    from stoker_kernels.workloads import workloads

    done = []
    for name, work in workloads().items():
        outputs = work.call("cpu", torch.float32, **work.small)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert all(one.device.type == "cpu" for one in outputs if isinstance(one, torch.Tensor))
        done.append(name)
    return done


def test_every_op_is_callable_inside_a_gpu_task() -> None:
    from stoker_kernels.workloads import workloads

    assert get(call_every_op.remote(), COLD_S) == list(workloads())


def test_workers_get_the_nodes_cache_unless_the_user_names_another(folder: Path) -> None:
    assert get(variables.remote()) == {"TRITON_CACHE_DIR": str(folder / "near/triton")}
    own = variables.options(runtime_env={"env_vars": {"TRITON_CACHE_DIR": "/tmp/mine"}})
    assert get(own.remote()) == {"TRITON_CACHE_DIR": "/tmp/mine"}


def test_what_is_named_is_compiled_before_the_task_starts() -> None:
    specs = [NORM, f"{STEPS}:step"]
    named = lookups.options(runtime_env={"kernels": specs})
    found = get(named.remote(specs), COLD_S)
    assert len(found) >= 4 and all(found)  # the task compiled nothing
    other = [{**NORM, "dtype": "float16", "columns": 200}]
    assert not any(get(named.remote(other), COLD_S))  # what nobody named, the task compiles


def test_what_cannot_be_compiled_fails_the_task_with_the_reason() -> None:
    wrong = {
        "rms_norn": r"runtime_env\.kernels\[0\]\.op: no op 'rms_norn'\.\ndid you mean 'rms_norm'",
        f"{STEPS}:broken_step": r"(?s)code 1.*ValueError: the shapes do not match",
    }
    refs = {e: variables.options(runtime_env={"kernels": [e]}).remote() for e in wrong}
    for entry, said in wrong.items():
        with pytest.raises(RuntimeEnvSetupError, match=said):
            get(refs[entry], COLD_S)


def test_a_form_that_makes_no_sense_fails_at_the_call() -> None:
    with pytest.raises(BadRequestError, match=r"runtime_env\.kernels\[0\]\.columns"):
        variables.options(runtime_env={"kernels": [{**NORM, "columns": 0}]}).remote()


def node_records() -> dict[str, dict[str, Any]]:
    return {node["node_id"]: node for node in stoker.nodes() if node["state"] == "ALIVE"}


def details(columns: int) -> dict[str, str]:
    """What speaks for each node, in the words of ``stoker explain``."""
    spec = {"op": "rms_norm", "dtype": "float32", "sizes": {"columns": columns}}
    runtime = stoker.runtime.current.runtime()
    demand = {
        "job_id": runtime.job.job_id,
        "resources": {"GPU": 1.0},
        "runtime_env": {"kernels": [spec]},
    }
    told = runtime.job.http.call("POST", "/v1/explain", demand, reply=dict[str, Any])
    return {verdict["node_id"]: verdict["detail"] for verdict in told["verdicts"]}


def is_idle() -> bool:
    return stoker.available_resources() == stoker.cluster_resources()


@stoker.remote(num_gpus=1)
def where() -> str:
    return str(stoker.get_runtime_context().get_node_id())


def test_a_task_goes_to_the_node_that_has_compiled_its_kernels(
    head: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_KERNEL_CACHE_DIR", str(folder / "far"))
    node = spawn_node(
        head.info.gcs_url, token=head.info.token, num_cpus=2, num_gpus=2, session_dir=folder / "s"
    )
    hint = "it has compiled the kernels"
    try:
        node.wait_ready()
        until(lambda: len(node_records()) == 2, 40, "both nodes are there")
        # Each node compiles one set: whichever of two equal nodes is preferred, one set is not there.
        compiled_on = dict(zip((768, 832), node_records(), strict=True))
        for columns, node_id in compiled_on.items():
            pinned = where.options(
                runtime_env={"kernels": [{**NORM, "columns": columns}]},
                scheduling_strategy=stoker.NodeAffinity(node_id=node_id),
            )
            assert get(pinned.remote(), COLD_S) == node_id
            told = {one: hint if one == node_id else "" for one in compiled_on.values()}
            until(
                lambda columns=columns, told=told: details(columns) == told,
                40, "the scheduler is told",
            )  # fmt: skip
        for columns, node_id in compiled_on.items():
            # A node is not filled for the hint's sake, so leases that end have to be gone.
            until(is_idle, 40, "all leases went back")
            named = where.options(runtime_env={"kernels": [{**NORM, "columns": columns}]})
            assert get(named.remote(), COLD_S) == node_id
        told_nodes = warm([{**NORM, "columns": 768}], timeout=COLD_S)
        assert told_nodes == dict.fromkeys(compiled_on.values(), "")
        until(lambda: set(details(768).values()) == {hint}, 40, "both are warm")
    finally:
        node.stop()
    until(lambda: len(node_records()) == 1, 40, "the second node left")


def test_measured_configurations_are_kept_and_reach_compiler_and_tasks(folder: Path) -> None:
    trials: list[dict[str, Any]] = []
    kept = autotune(
        "rms_norm", dtype="float32", rows=8, columns=64, interpreted=True, time_limit=1.0,
        progress=trials.append,
    )  # fmt: skip
    assert {record.kernel for record in kept} == {"rms_norm_fwd", "rms_norm_bwd"}
    for record in kept:
        assert record.device == "cpu" and record.key == {"columns": 64, "dtype": "float32"}
        assert 0 < record.low_seconds <= record.seconds <= record.high_seconds
        assert record.candidates >= record.measured >= 1
        assert record.seconds <= record.default_seconds
        assert record.torch == torch.__version__ and record.triton and record.version
    ended = [t for t in trials if t["state"] != "begun"]
    assert {t["state"] for t in ended} <= {"measured", "late"}
    assert len({t["identity"] for t in ended}) == len(ended) == sum(r.candidates for r in kept)
    # A worker whose environment names kernels sees the table; others start as before.
    spec = {"op": "rms_norm", "dtype": "float32", "columns": 64, "rows": 8}
    seen = get(variables.options(runtime_env={"kernels": [spec]}).remote(), COLD_S)
    table = json.loads(Path(seen["STOKER_KERNELS_TUNING"]).read_text())
    assert {one["kernel"]: one["config"] for one in table} == {r.kernel: r.config for r in kept}
    assert "STOKER_KERNELS_TUNING" not in get(variables.remote())
    assert all(get(lookups.options(runtime_env={"kernels": [spec]}).remote([spec]), COLD_S))


@pytest.mark.logs(r"is no measurement")
def test_the_command_line_tunes_as_a_job_and_lists_what_is_kept(head: Any) -> None:
    def stoker_command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "stoker.cli", "kernels", *arguments],
            env=_cluster.environment(head), capture_output=True, text=True, timeout=COLD_S,
        )  # fmt: skip

    tuned = stoker_command(
        "tune", "add_rms_norm", "rows=4", "columns=32", "--dtype", "float32", "--interpreted",
        "--time-limit", "1",
    )  # fmt: skip
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    assert "rms_norm_fwd 1/" in tuned.stdout and "on cpu: " in tuned.stdout
    listed = stoker_command("list", "--json", "--device", "cpu")
    found = {(one["op"], one["kernel"], one["key"]["columns"]) for one in json.loads(listed.stdout)}
    assert ("add_rms_norm", "rms_norm_bwd", 32) in found
    stoker.kv.put("cpu/k/mine", b"7", namespace="stoker.kernels")
    table = stoker_command("list")
    assert table.returncode == 0
    assert "1 key of the namespace stoker.kernels without a measurement" in table.stderr
    shown = table.stdout.splitlines()
    assert shown[0].split()[:3] == ["DEVICE", "KERNEL", "SHAPE"]
    assert any("columns=32,dtype=float32" in line for line in shown)
    wrong = stoker_command("warm", "rms_norn")
    assert wrong.returncode == 1 and "did you mean 'rms_norm'" in wrong.stdout


def test_measuring_where_no_gpu_is_says_so() -> None:
    with pytest.raises(Exception, match="sees no GPU: measure where there is one"):
        autotune("rms_norm")
