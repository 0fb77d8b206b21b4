"""Compiling before a worker starts: once for all who wait, again when code changes, errors with reasons.

A few lines of Python stand in for the compiler; ``tests/e2e/train/kernels`` runs the real one.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stoker_nodelet.environments.environments import Environment
from stoker_nodelet.kernels import compiler as kernel_compiler
from stoker_nodelet.kernels.cache import CompiledSet, KernelCache
from stoker_nodelet.kernels.compiler import KernelCompiler, compile_specs
from stoker_wire.errors import RuntimeEnvSetupError
from stoker_wire.messages.cluster import MAX_WARM_KERNELS, Device
from stoker_wire.messages.common import KernelSpec, RuntimeEnv
from stoker_wire.messages.kernels import kernel_set
from stoker_wire.process.background import Background
from tests.leaks import alive
from tests.services import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

WANTED = RuntimeEnv(kernels=(KernelSpec(op="rms_norm"),))
WARM = kernel_set(WANTED)


class NoTables:
    """Nothing was measured; asked-for devices are noted."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.path = ""

    async def file(self, device: str) -> str:
        self.asked.append(device)
        return self.path


class Compiler:
    """Notes its calls, makes one entry per call, and fails or waits when told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, str]]] = []
        self.fails = ""
        self.called = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(
        self, command: list[str], specs: bytes, variables: dict[str, str], *_: Any
    ) -> list[dict[str, Any]]:
        self.calls.append((command, variables))
        self.called.set()
        await self.gate.wait()
        if self.fails:
            raise RuntimeEnvSetupError(self.fails)
        from pathlib import Path

        folder = Path(variables["TRITON_CACHE_DIR"]) / f"e{len(self.calls)}"
        folder.mkdir(parents=True)
        (folder / "__grp__k.json").write_text("{}")
        return [{"entry": folder.name, "cached": False}]


@pytest.fixture
async def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(kernel_compiler, "compile_specs", made)
    monkeypatch.setattr(kernel_compiler, "code_version", lambda: "v1")
    return made


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[KernelCompiler]:
    root = tmp_path / "kernels"
    root.mkdir()
    background = Background("test")
    devices = {
        0: Device(index=0, uuid="a", name="NVIDIA H200", arch=90),
        1: Device(index=1, uuid="b", name="NVIDIA A100", arch=80),
        2: Device(index=2, uuid="c", name="Fake GPU", fake=True),
    }
    cache = KernelCache(root, root / "triton", 1 << 30)
    yield KernelCompiler(cache, NoTables(), devices, 0, 60.0, background)  # type: ignore[arg-type]
    await background.close()


def archs(compiler: Compiler) -> list[str]:
    return [command[command.index("--arch") + 1] for command, _ in compiler.calls]


async def test_it_compiles_for_the_gpus_of_the_lease_and_then_never_again(
    node: KernelCompiler, compiler: Compiler
) -> None:
    await node.prepare(WANTED, Environment(), {0: 1.0})
    assert archs(compiler) == ["90"] and node.warm == (WARM,)
    await node.prepare(WANTED, Environment(), {0: 0.5})
    assert archs(compiler) == ["90"]
    await node.prepare(WANTED, Environment(), {0: 1.0, 1: 1.0})
    assert archs(compiler) == ["90", "80"]


async def test_without_a_known_architecture_there_is_nothing_to_compile_for(
    node: KernelCompiler, compiler: Compiler
) -> None:
    await node.prepare(WANTED, Environment(), {})
    await node.prepare(WANTED, Environment(), {2: 1.0})
    assert not compiler.calls and node.warm == ()
    node.arch = 100  # the setting: for nodes whose GPUs say nothing, and for those without
    await node.prepare(WANTED, Environment(), {2: 1.0})
    await node.prepare(WANTED, Environment(), {0: 1.0})
    assert archs(compiler) == ["100", "90"]


async def test_an_environment_without_kernels_is_left_alone(
    node: KernelCompiler, compiler: Compiler
) -> None:
    made = Environment(env_vars={"A": "1"})
    assert await node.prepare(RuntimeEnv(), made, {0: 1.0}) is made
    assert not compiler.calls and not node.tables.asked  # type: ignore[attr-defined]


async def test_those_who_ask_at_once_share_one_run_and_its_failure(
    node: KernelCompiler, compiler: Compiler
) -> None:
    compiler.gate.clear()
    compiler.fails = "no such register"
    waiting = [
        asyncio.ensure_future(node.prepare(WANTED, Environment(), {0: 1.0})) for _ in range(4)
    ]
    await compiler.called.wait()
    waiting[0].cancel()  # one gives up; the others still get theirs
    compiler.gate.set()
    told = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(told[0], asyncio.CancelledError)
    assert [str(one) for one in told[1:]] == ["no such register."] * 3
    assert len(compiler.calls) == 1 and node.warm == ()
    compiler.fails = ""
    await node.prepare(WANTED, Environment(), {0: 1.0})  # a failure is not kept
    assert len(compiler.calls) == 2 and node.warm == (WARM,)


async def test_changed_code_is_compiled_again_and_so_are_trimmed_entries(
    node: KernelCompiler, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.prepare(WANTED, Environment(), {0: 1.0})
    (next(node.cache.triton_dir.iterdir()) / "__grp__k.json").unlink()
    await node.prepare(WANTED, Environment(), {0: 1.0})
    assert len(compiler.calls) == 2
    monkeypatch.setattr(kernel_compiler, "code_version", lambda: "v2")
    await node.prepare(WANTED, Environment(), {0: 1.0})
    assert len(compiler.calls) == 3


async def test_variables_that_reach_no_op_do_not_matter_but_may_to_a_function(
    node: KernelCompiler, compiler: Compiler
) -> None:
    call = RuntimeEnv(kernels=(KernelSpec(call="mine:step"),))
    for wanted, runs in ((WANTED, 1), (call, 1 + 2)):
        for run_id in "12":
            await node.prepare(wanted, Environment(env_vars={"RUN_ID": run_id}), {0: 1.0})
        assert len(compiler.calls) == runs
    await node.prepare(WANTED, Environment(env_vars={"TRITON_DEBUG": "1"}), {0: 1.0})
    assert len(compiler.calls) == 4


async def test_the_compiler_sees_the_workers_world_but_no_gpu_and_no_interpreter(
    node: KernelCompiler, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    mine = {"TRITON_CACHE_DIR": str(tmp_path / "mine"), "TRITON_INTERPRET": "1", "PYTHONPATH": "/u"}
    await node.prepare(WANTED, Environment(env_vars=mine, sys_path=("/code",)), {0: 1.0})
    ((_, variables),) = compiler.calls
    assert variables["TRITON_CACHE_DIR"] == str(tmp_path / "mine")
    assert variables["CUDA_VISIBLE_DEVICES"] == "" and "TRITON_INTERPRET" not in variables
    assert variables["PYTHONPATH"].split(os.pathsep) == ["/code", "/u"]  # both, as in a worker


async def test_the_table_of_the_device_reaches_compiler_and_worker(
    node: KernelCompiler, compiler: Compiler
) -> None:
    plain = await node.prepare(WANTED, Environment(), {0: 1.0})
    assert plain.env_vars == {}
    node.tables.path = "/tables/t1.json"  # type: ignore[misc]
    tuned = await node.prepare(WANTED, Environment().keyed(), {0: 1.0})
    assert tuned.env_vars == {"STOKER_KERNELS_TUNING": "/tables/t1.json"}
    assert tuned.key != Environment().keyed().key  # no worker of another table is used again
    assert compiler.calls[-1][1]["STOKER_KERNELS_TUNING"] == "/tables/t1.json"
    assert len(compiler.calls) == 2
    own = Environment(env_vars={"STOKER_KERNELS_TUNING": "/mine.json"})
    assert (await node.prepare(WANTED, own, {2: 1.0})).env_vars == own.env_vars
    assert node.tables.asked == ["NVIDIA H200", "NVIDIA H200"]  # type: ignore[attr-defined]
    await node.prepare(WANTED, Environment(), {2: 1.0})
    assert node.tables.asked[-1] == "cpu"  # type: ignore[attr-defined]


async def test_a_new_nodelet_knows_what_the_one_before_compiled(
    node: KernelCompiler, compiler: Compiler
) -> None:
    await node.prepare(WANTED, Environment(), {0: 1.0})
    node.cache.note("gone", CompiledSet("gone", str(node.cache.triton_dir), ("none",), "v1"))
    later = KernelCompiler(node.cache, NoTables(), {}, 0, 60.0, node.background)  # type: ignore[arg-type]
    assert later.warm == ()
    node.background.spawn(later.run(), name="kernels")
    async with asyncio.timeout(40):
        while later.warm != (WARM,):  # noqa: ASYNC110  a thread looks, and tells nobody
            await asyncio.sleep(0.01)


async def test_the_sets_told_are_those_used_last(node: KernelCompiler) -> None:
    for number in range(MAX_WARM_KERNELS + 3):
        node._note(f"k{number:03}")
    node._note("k003")
    assert len(node.warm) == MAX_WARM_KERNELS and node.warm[:2] == ("k003", "k004")


PROGRAM = [sys.executable, "-c"]


async def test_what_the_compiler_says_becomes_the_error() -> None:
    spec = "import sys; sys.stderr.write('error: kernels[1].op: no op\\n'); sys.exit(2)"
    with pytest.raises(RuntimeEnvSetupError, match=r"^runtime_env\.kernels\[1\]\.op: no op\.$"):
        await compile_specs([*PROGRAM, spec], b"[]", dict(os.environ), None, 30.0)
    crash = "raise ValueError('too many registers')"
    with pytest.raises(
        RuntimeEnvSetupError, match=r"ended with code 1\.\n(?s:.*)too many registers"
    ):
        await compile_specs([*PROGRAM, crash], b"[]", dict(os.environ), None, 30.0)


async def test_a_compiler_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    hang = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )
    with pytest.raises(RuntimeEnvSetupError, match=r"(?s)not compiled within 1 s.*kernel_compile"):
        await compile_specs([*PROGRAM, hang], b"[]", dict(os.environ), None, 1.0)
    child = int(pid_file.read_text())
    until(lambda: not alive(child), 40.0, "its child is gone")


async def test_what_a_compiler_leaves_running_ends_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    leave = (
        "import subprocess; child = subprocess.Popen(['sleep', '600']); "
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))"
    )
    assert await compile_specs([*PROGRAM, leave], b"[]", dict(os.environ), None, 60.0) == []
    child = int(pid_file.read_text())
    until(lambda: not alive(child), 40.0, "its child is gone")


async def test_records_that_are_none_are_an_error_and_of_complaints_the_last_are_kept() -> None:
    with pytest.raises(RuntimeEnvSetupError, match=r"records cannot be read\.\nJSON is malformed"):
        await compile_specs([*PROGRAM, "print('hello')"], b"[]", dict(os.environ), None, 30.0)
    flood = "import sys; sys.stderr.write('x' * 10_000_000 + '\\nat last'); sys.exit(1)"
    with pytest.raises(RuntimeEnvSetupError, match=r"at last$") as told:
        await compile_specs([*PROGRAM, flood], b"[]", dict(os.environ), None, 30.0)
    assert len(str(told.value)) < 100_000


async def test_a_cache_that_cannot_be_looked_at_does_not_end_the_care_for_it(
    node: KernelCompiler, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def names(cache: KernelCache, version: str) -> list[str]:
        looks.append(version)
        if len(looks) == 1:
            raise OSError("read-only")
        return ["k"]

    monkeypatch.setattr(kernel_compiler, "TRIM_S", 0.0)
    monkeypatch.setattr(KernelCache, "names", names)
    node.background.spawn(node.run(), name="kernels")
    async with asyncio.timeout(40):
        while node.warm != ("k",):  # noqa: ASYNC110  a thread looks, and tells nobody
            await asyncio.sleep(0.01)


async def test_a_compiler_that_cannot_be_started_says_so() -> None:
    with pytest.raises(RuntimeEnvSetupError, match=r"cannot be started\.\n.*no/such/python"):
        await compile_specs(["/no/such/python"], b"[]", {}, None, 5.0)
