"""GPUs that the kernel keeps from workers without a lease of them; harmless devices are in their place."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.devices.fake_file import FakeGpuFile
from stoker_nodelet.devices.isolation import find_isolation
from stoker_wire.messages.cluster import Node
from stoker_wire.messages.control import Page
from tests.e2e._cluster import cli, head, http, run_driver
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.launch import LocalCluster

WAIT_S = 40.0
PATHS = ("/dev/zero", "/dev/full", "/dev/random")
PRELUDE = f"""
import os, subprocess, sys, time
import stoker

PATHS = {PATHS}
PROGRAM = '''
import os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError as error:
        print(error.errno, end=" ")
    else:
        print(0, end=" ")
'''

def opens():
    "The error, or 0, of opening each device: in the worker, and in a process that it starts."
    own = []
    for path in PATHS:
        try:
            os.close(os.open(path, os.O_RDONLY))
        except PermissionError as error:
            own.append(error.errno)
        else:
            own.append(0)
    child = subprocess.run(
        ["/bin/sh", "-c", '"$@"; true', "sh", sys.executable, "-c", PROGRAM, *PATHS],
        capture_output=True, text=True, check=True,
    ).stdout
    assert [int(one) for one in child.split()] == own, child
    return own
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("isolated")
    (folder / "opens_at_import.py").write_text(f"{PRELUDE}\nAT_IMPORT = opens()")
    path = folder / "gpus.json"
    path.write_text(json.dumps({"devices": [{"device_node": one} for one in PATHS]}))
    verdict = find_isolation("auto", FakeGpuFile(str(path)).inventory(), "n_probe")
    if verdict.isolation is None:
        pytest.skip(f"this machine cannot keep workers off devices: {verdict.reason}")
    verdict.isolation.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_FAKE_GPU_FILE", str(path))
        patch.setenv("STOKER_GPU_ISOLATION", "required")
        patch.setenv("PYTHONPATH", str(folder))
        with head(tmp_path_factory.mktemp("g"), num_cpus=4, num_gpus=None) as made:
            (node,) = http(made).call("GET", "/v1/nodes", reply=Page[Node]).items
            assert node.gpu_isolation == verdict.isolation.name
            assert node.gpu_isolation_error == ""
            yield made
    own = verdict.isolation.hierarchy.own
    assert not list(own.glob(f"stoker-{node.node_id}-*")), "cgroups are left"


def denied(*indices: int) -> list[int]:
    return [errno.EPERM if index in indices else 0 for index in range(len(PATHS))]


def test_a_lease_opens_its_gpus_and_no_others(cluster: LocalCluster) -> None:
    program = """
        import os, subprocess, sys, time, json
        import stoker
        exec(os.environ["STOKER_TEST_PRELUDE"])
        stoker.init(log_to_driver=False)

        @stoker.remote(num_cpus=0)
        def nothing():
            return opens()

        @stoker.remote(num_cpus=0, num_gpus=1)
        class Holder:
            def sees(self):
                return stoker.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"], opens()

        @stoker.remote(num_cpus=0, num_gpus=1)
        def again():
            return stoker.get_gpu_ids(), opens()

        shown = {"nothing": stoker.get([nothing.remote() for _ in range(3)])}
        holders = [Holder.remote(), Holder.remote()]
        shown["holders"] = stoker.get([one.sees.remote() for one in holders])
        halves = [Holder.options(num_gpus=0.5).remote() for _ in range(2)]
        shown["halves"] = stoker.get([one.sees.remote() for one in halves])
        shown["still"] = stoker.get(holders[0].sees.remote())
        shown["after"] = stoker.get(nothing.remote())
        stoker.kill(holders[1])
        shown["again"] = stoker.get([again.remote() for _ in range(2)])
        print(json.dumps(shown))
    """
    told = run_driver(cluster, program, STOKER_TEST_PRELUDE=PRELUDE)
    assert told.returncode == 0, told.stderr
    shown = json.loads(told.stdout)
    assert shown["nothing"] == [denied(0, 1, 2)] * 3 and shown["after"] == denied(0, 1, 2)
    held = [gpus for (gpus, _, _) in (*shown["holders"], shown["halves"][0])]
    assert sorted(held) == [[0], [1], [2]]
    assert shown["halves"][0] == shown["halves"][1]
    for (index,), mask, own in (*shown["holders"], *shown["halves"], shown["still"]):
        assert own == denied(*{0, 1, 2} - {index})
        assert mask == f"FAKE-{index}", "CUDA counts only what it may open"
    (freed,) = shown["holders"][1][0]
    assert shown["again"] == [[[freed], denied(*{0, 1, 2} - {freed})]] * 2


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_so_does_the_entrypoint_of_a_job(
    cluster: LocalCluster, tmp_path: Path, num_gpus: int
) -> None:
    script = tmp_path / "entry.py"
    script.write_text(f"{PRELUDE}\nprint('opens', opens().count(0))")
    entrypoint = f"{sys.executable} {script}"
    options = ("--num-gpus", str(num_gpus)) if num_gpus else ()
    told = cli(cluster, "job", "submit", *options, "--", *entrypoint.split())
    assert f"opens {num_gpus}\n" in told.stdout, told.stdout + told.stderr


def test_modules_are_preloaded_without_gpus(cluster: LocalCluster) -> None:
    program = """
        import stoker
        stoker.init(log_to_driver=False, runtime_env={"preload": ["opens_at_import"]})

        @stoker.remote(num_cpus=0, num_gpus=3)
        def both():
            import opens_at_import
            return opens_at_import.AT_IMPORT, opens_at_import.opens()

        print(stoker.get(both.remote()))
    """
    told = run_driver(cluster, program)
    assert told.stdout == f"{(denied(0, 1, 2), denied())}\n", told.stderr


def test_a_worker_that_has_ended_leaves_no_cgroup(cluster: LocalCluster) -> None:
    program = """
        import os, stoker
        stoker.init(log_to_driver=False)

        @stoker.remote(num_cpus=0, num_gpus=1)
        def where():
            return open("/proc/self/cgroup").read()

        print(stoker.get(where.remote()))
    """
    told = run_driver(cluster, program)
    paths = [line.rpartition(":")[2] for line in told.stdout.splitlines() if "/stoker-n_" in line]
    assert len(paths) == 1, told.stdout + told.stderr
    (found,) = list(Path("/sys/fs/cgroup").glob(f"**{paths[0]}")) or [Path("/none")]
    until(lambda: not found.exists(), WAIT_S, "the cgroup of a worker is gone")


def test_a_node_that_must_isolate_gpus_and_cannot_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"devices": [{"device_node": "/dev/none/0"}]}))
    asked = {"STOKER_FAKE_GPU_FILE": str(path), "STOKER_TOKEN": "a-token-for-tests"}
    command = [sys.executable, "-m", "stoker_nodelet", "--gcs-url", "http://127.0.0.1:9"]
    refused = subprocess.run(
        [*command, "--session-dir", str(tmp_path / "session")],
        env={**os.environ, **asked, "STOKER_GPU_ISOLATION": "required"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode != 0
    assert "STOKER_GPU_ISOLATION=required: workers cannot be kept off" in refused.stderr
    assert "No such file or directory (/dev/none/0)" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_one_that_may_go_without_says_why_it_does(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"devices": [{"device_node": "/dev/none/0"}]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_FAKE_GPU_FILE", str(path))
        patch.setenv("STOKER_GPU_ISOLATION", "auto")
        with head(tmp_path, num_cpus=1, num_gpus=None) as made:
            told = cli(made, "status")
            (node,) = http(made).call("GET", "/v1/nodes", reply=Page[Node]).items
    assert node.gpu_isolation == "" and "(/dev/none/0)" in node.gpu_isolation_error
    said = " ".join(told.stdout.split())
    assert "GPUs are not enforced" in said and "(/dev/none/0)" in said
