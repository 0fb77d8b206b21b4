"""GPUs that the kernel keeps from workers, with harmless devices in their place and real cgroups."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stoker_nodelet.devices import isolation as isolation_module
from stoker_nodelet.devices.device_cgroups import DevicePrograms, DevicesController, number_of
from stoker_nodelet.devices.inventory import Inventory
from stoker_nodelet.devices.isolation import Isolation, find_isolation
from stoker_wire.errors import BadRequestError, UnavailableError
from stoker_wire.messages.cluster import Device

if TYPE_CHECKING:
    from collections.abc import Iterator

PATHS = ("/dev/zero", "/dev/full", "/dev/random")
"""Those of GPU 0 and 1, and that of one that is not offered."""
HIERARCHIES = (DevicesController, DevicePrograms)
OPEN = """
import os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        print(error.errno)
    else:
        print(0)
"""


def gpus(*paths: str, fake: bool = True) -> Inventory:
    devices = tuple(
        Device(index=index, uuid=f"GPU-{index}", name="GPU", fake=fake)
        for index in range(len(paths))
    )
    nodes = {index: frozenset((path,)) for index, path in enumerate(paths) if path}
    return Inventory(devices, nodes=nodes, guarded=frozenset(filter(None, (*paths, PATHS[2]))))


@pytest.fixture(params=HIERARCHIES, ids=["v1", "v2"])
def isolation(request: pytest.FixtureRequest) -> Iterator[Isolation]:
    try:
        made = Isolation.begin(request.param(), gpus(*PATHS[:2]), "n_test")
    except OSError as error:
        pytest.skip(f"this machine has no {request.param.title} that we may write to: {error}")
    try:
        yield made
    finally:
        made.close()
        assert not made.root.exists(), "nothing is left in the cgroup"


def opened(group: str, *paths: str) -> list[int]:
    """Return the error, or 0, of opening each path in a process, and in a child of a shell, of a cgroup."""
    program = [sys.executable, "-c", OPEN, *paths]
    command = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', group]
    itself = subprocess.run([*command, *program], capture_output=True, text=True, check=True)
    child = [*command, "/bin/sh", "-c", '"$@"; exit 0', "sh", *program]
    below = subprocess.run(child, capture_output=True, text=True, check=True)
    assert itself.stdout == below.stdout
    return [int(line) for line in itself.stdout.split()]


def test_a_worker_opens_the_gpus_of_its_lease_and_no_others(isolation: Isolation) -> None:
    assert opened(isolation.add("w_1", ()), *PATHS) == [errno.EPERM] * 3
    group = isolation.add("w_2", (1,))
    assert opened(group, *PATHS, "/dev/null", "/dev/urandom") == [errno.EPERM, 0, errno.EPERM, 0, 0]
    isolation.grant("w_2", (0,))
    assert opened(group, *PATHS) == [0, errno.EPERM, errno.EPERM]
    isolation.grant("w_2", (0, 1))
    assert opened(group, *PATHS) == [0, 0, errno.EPERM]
    isolation.grant("w_2", ())
    assert opened(group, *PATHS) == [errno.EPERM] * 3
    assert opened(isolation.add("w_3", (0,)), *PATHS) == [0, errno.EPERM, errno.EPERM]
    with pytest.raises(UnavailableError, match="w_9 is gone"):
        isolation.grant("w_9", (0,))
    names = {one.name for one in isolation.root.iterdir() if one.is_dir()}
    assert names == {"none", "w_1", "w_2", "w_3"}
    isolation.remove("w_2")
    isolation.remove("w_2")
    assert not (isolation.root / "w_2").exists()


def test_a_lease_of_all_gpus_opens_all(isolation: Isolation) -> None:
    isolation.guarded = isolation.guarded - {number_of(PATHS[2])}
    group = isolation.add("w_1", (0, 1))
    assert opened(group, *PATHS) == [0, 0, 0]
    isolation.grant("w_1", (0,))
    isolation.grant("w_1", (0, 1))
    assert opened(group, *PATHS) == [0, 0, 0]


def test_nothing_is_done_for_a_lease_of_the_same_gpus(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolation.add("w_1", ())
    isolation.add("w_2", (1,))
    monkeypatch.setattr(isolation, "hierarchy", None)
    isolation.grant("w_1", {})
    isolation.grant("w_2", {1: 0.5})
    isolation.remove("w_1")


def test_what_is_without_gpus_has_none(isolation: Isolation) -> None:
    command = [*isolation.without_gpus, sys.executable, "-c", OPEN, *PATHS]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.split() == [str(errno.EPERM)] * 3


def test_a_cgroup_in_which_something_lives_on_is_removed_later(isolation: Isolation) -> None:
    group = isolation.add("w_1", ())
    nested = Path(group, "stoker-nested")
    nested.mkdir()  # of a cluster that ran in the worker
    command = ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs" && echo in && read line', group]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        assert left.stdout.readline() == b"in\n"
        isolation.remove("w_1")
        assert os.path.exists(group) and not nested.exists()
        left.communicate(b"\n")
    isolation.add("w_2", ())
    assert not os.path.exists(group)


def test_the_cgroups_of_a_nodelet_that_was_killed_are_removed(isolation: Isolation) -> None:
    name = type(isolation.hierarchy).__name__
    program = f"""
import os
from stoker_nodelet.devices.device_cgroups import {name}
from stoker_nodelet.devices.inventory import Inventory
from stoker_nodelet.devices.isolation import Isolation
gpus = Inventory(nodes={{0: frozenset(("/dev/zero",))}}, guarded=frozenset(("/dev/zero",)))
made = Isolation.begin({name}(), gpus, "n_killed")
made.add("w_1", ())
print(made.root, flush=True)
input()
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        root = Path(one.stdout.readline().strip())
        Isolation.begin(isolation.hierarchy, gpus(*PATHS[:2]), "n_other").close()
        assert (root / "w_1").is_dir(), "it lives"
        one.communicate("\n")
    Isolation.begin(isolation.hierarchy, gpus(*PATHS[:2]), "n_other").close()
    assert not root.exists()
    assert isolation.root.exists()


def test_a_node_without_gpus_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation_module, "HIERARCHIES", None)
    fakes = Inventory((Device(index=0, uuid="FAKE-0", name="Fake GPU", fake=True),))
    for mode in ("auto", "required", "off"):
        for inventory in (Inventory(), fakes):
            verdict = find_isolation(mode, inventory, "n_1")
            assert verdict.isolation is None and verdict.reason == ""


class Unmounted:
    title = "cgroup v1"

    def __init__(self) -> None:
        raise OSError(errno.ENOENT, "it is not mounted")


def test_why_gpus_are_not_isolated_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class NoCgroup(DevicePrograms):
        """A folder can be made in it, and nothing attached to that."""

        def __init__(self) -> None:
            super().__init__(own=tmp_path)

    def refused(mode: str, inventory: Inventory) -> str:
        verdict = find_isolation(mode, inventory, "n_1")
        assert verdict.isolation is None
        return verdict.reason

    monkeypatch.setattr(isolation_module, "HIERARCHIES", (Unmounted, NoCgroup))
    assert refused("off", gpus("/dev/zero")) == "STOKER_GPU_ISOLATION is off"
    assert refused("auto", gpus("", fake=False)) == "GPU 0 has no device node of its own"
    assert "No such file" in refused("auto", gpus("/dev/nvidia77"))
    reason = refused("auto", gpus("/dev/zero"))
    assert reason.startswith("cgroup v1: it is not mounted; cgroup v2: bpf(2): ")
    with pytest.raises(BadRequestError, match="kept off the GPUs of others") as error:
        find_isolation("required", gpus("/dev/zero"), "n_1")
    assert reason in str(error.value) and "or set STOKER_GPU_ISOLATION=auto" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_kernel_that_denies_nothing_is_found_out(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(isolation.hierarchy), "deny", lambda *_: None)
    with pytest.raises(OSError, match="it does not deny /dev/full, /dev/random, /dev/zero"):
        Isolation.begin(isolation.hierarchy, gpus(*PATHS[:2]), "n_other")
    assert not list(isolation.hierarchy.own.glob("stoker-n_other-*"))
