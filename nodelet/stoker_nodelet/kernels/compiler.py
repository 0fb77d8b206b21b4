"""Compilation of the kernels that a runtime environment names, once per node, before its worker starts.

The work is done by ``python -m stoker_kernels.aot`` in the environment's own Python: no torch and no
Triton is imported here. Requests for the same kernels at the same time share one run; kernels that
are in the cache cost a look at their files. A failure is the environment's: RuntimeEnvSetupError with
the last lines that the compiler wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stoker_nodelet.kernels.cache import TRITON_VARIABLE, CompiledSet, KernelCache
from stoker_nodelet.kernels.tuning_tables import TuningTables, triton_version
from stoker_wire.errors import RuntimeEnvSetupError
from stoker_wire.messages.cluster import MAX_WARM_KERNELS, Device
from stoker_wire.messages.kernels import CPU_DEVICE, TABLE_VARIABLE, digest_of, kernel_set
from stoker_wire.process.background import Background
from stoker_wire.version import VERSION

if TYPE_CHECKING:
    from stoker_nodelet.environments.environments import Environment
    from stoker_wire.messages.common import RuntimeEnv

TRIM_S = 600.0
_LINES = 20
_TAIL_BYTES = 1 << 16
_POLL_S = 0.02
_DECISIVE = ("TRITON_", "STOKER_KERNELS_", "LLVM_", "DISABLE_LLVM_OPT")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class KernelCompiler:
    """Compiler and cache of this node's kernels. ``arch`` is used where no device names its own."""

    cache: KernelCache
    tables: TuningTables
    devices: dict[int, Device]
    arch: int
    timeout_s: float
    background: Background
    _warm: dict[str, None] = field(default_factory=dict)
    _runs: dict[str, asyncio.Task[RuntimeEnvSetupError | None]] = field(default_factory=dict)

    @property
    def warm(self) -> tuple[str, ...]:
        """The kernel sets in the cache: those used last, in the order of their names."""
        return tuple(sorted(self._warm))

    async def run(self) -> None:
        """Index what earlier sessions compiled; keep the cache within its size, for ever."""
        while True:
            try:
                await self._refresh_warm()
                await asyncio.sleep(TRIM_S)
                removed = await asyncio.to_thread(self.cache.trim)
            except OSError as error:
                _log.warning("the kernel cache %s: %s", self.cache.root, error)
                await asyncio.sleep(TRIM_S)
                continue
            if removed:
                _log.info("removed %d bytes of compiled kernels", removed)

    async def _refresh_warm(self) -> None:
        before = dict(self._warm)
        names = await asyncio.to_thread(lambda: self.cache.names(code_version()))
        # Sets that were added while the files were read are the latest.
        added = [n for n in self._warm if n in names or n not in before]
        warm = [n for n in names if n not in added] + added
        self._warm = dict.fromkeys(warm[-MAX_WARM_KERNELS:])

    async def prepare(
        self, wanted: RuntimeEnv, environment: Environment, gpus: dict[int, float]
    ) -> Environment:
        """Return ``environment`` with what its kernels need; they are compiled for the lease's ``gpus``.

        Without a GPU whose architecture is known nothing is compiled: there is nothing to compile for.
        """
        if not wanted.kernels:
            return environment
        table = environment.env_vars.get(TABLE_VARIABLE, "")
        if not table:
            table = await self._table(gpus)
            environment = environment.with_variables({TABLE_VARIABLE: table} if table else {})
        known = (self.devices.get(index) for index in gpus)
        archs = {(device.arch if device else 0) or self.arch for device in known} or {self.arch}
        for arch in sorted(archs - {0}):
            await self._ensure_compiled(wanted, environment, arch)
        return environment

    async def _table(self, gpus: dict[int, float]) -> str:
        """Return the file of what was measured on the lease's devices, or nothing."""
        names = {
            device.name
            for device in (self.devices.get(index) for index in gpus)
            if device is not None and not device.fake
        }
        return await self.tables.file(sorted(names)[0] if names else CPU_DEVICE)

    async def _ensure_compiled(
        self, wanted: RuntimeEnv, environment: Environment, arch: int
    ) -> None:
        name = kernel_set(wanted)
        triton_dir = environment.env_vars.get(TRITON_VARIABLE, str(self.cache.triton_dir))
        variables = _variables(environment, triton_dir)
        request_key = digest_of(
            (name, arch, environment.python, _key_parts(wanted, environment, variables))
        )
        if request_key not in self._runs:
            work = self._run(request_key, wanted, environment, arch, variables)
            self._runs[request_key] = self.background.spawn(work, name=f"compile-{request_key}")
        # A caller that gives up must not end the run of the others.
        failure = await asyncio.shield(self._runs[request_key])
        if failure is not None:
            raise RuntimeEnvSetupError(failure.message)
        self._note(name)

    async def _run(
        self,
        request_key: str,
        wanted: RuntimeEnv,
        environment: Environment,
        arch: int,
        variables: dict[str, str],
    ) -> RuntimeEnvSetupError | None:
        """Compile unless everything is in the cache. A failure is returned: it is no crash of ours."""

        def look() -> tuple[str, str, bool]:
            version = code_version()
            key = digest_of((request_key, version))
            return key, version, self.cache.find(key) is not None

        try:
            key, version, cached = await asyncio.to_thread(look)
            if not cached:
                await self._compile(key, version, wanted, environment, arch, variables)
        except RuntimeEnvSetupError as error:
            _log.info("compiling for sm_%d: %s", arch, error)  # the callers get the error
            return error
        finally:
            del self._runs[request_key]
        return None

    async def _compile(
        self,
        key: str,
        version: str,
        wanted: RuntimeEnv,
        environment: Environment,
        arch: int,
        variables: dict[str, str],
    ) -> None:
        name, started_s = kernel_set(wanted), time.monotonic()
        _log.info("compiling %d kernel specs for sm_%d: %s", len(wanted.kernels), arch, name)
        lines = await compile_specs(
            [environment.python, "-P", "-m", "stoker_kernels.aot", "--arch", str(arch)],
            msgspec.json.encode([_spec(spec) for spec in wanted.kernels]),
            variables,
            environment.cwd or None,
            self.timeout_s,
        )
        made_here = [line for line in lines if "entry" in line]
        entries = tuple(dict.fromkeys(line["entry"] for line in made_here))
        sources = {path: at_ns for line in lines for path, at_ns in line.get("sources", {}).items()}
        fresh, took_s = sum(not line["cached"] for line in made_here), time.monotonic() - started_s
        _log.info(
            "%d kernels of %s are in the cache, %d of them new, after %.1f s",
            len(entries), name, fresh, took_s,
        )  # fmt: skip
        try:
            done = CompiledSet(name, variables[TRITON_VARIABLE], entries, version, sources)
            await asyncio.to_thread(self.cache.note, key, done)
        except OSError as error:  # the kernels are there, and are looked for again next time
            _log.warning("the kernel cache %s: %s", self.cache.root, error)

    def _note(self, name: str) -> None:
        self._warm.pop(name, None)
        self._warm[name] = None
        while len(self._warm) > MAX_WARM_KERNELS:
            del self._warm[next(iter(self._warm))]


def _spec(spec: Any) -> dict[str, Any]:
    if spec.call:
        return {"call": spec.call}
    return {"op": spec.op, **({"dtype": spec.dtype} if spec.dtype else {}), **spec.sizes}


def _variables(environment: Environment, triton_dir: str) -> dict[str, str]:
    """Return the compiler's variables: those of the worker, but without GPU and Triton's interpreter."""
    known = {**os.environ, **environment.env_vars}
    path = (*environment.sys_path, known.get("PYTHONPATH", ""))
    variables = {
        **known,
        TRITON_VARIABLE: triton_dir,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "CUDA_VISIBLE_DEVICES": "",
    }
    variables.pop("TRITON_INTERPRET", None)
    return variables


def _key_parts(
    wanted: RuntimeEnv, environment: Environment, variables: dict[str, str]
) -> tuple[object, ...]:
    """Return what the compiled code depends on: everything for a user's function, little for an op."""
    if any(spec.call for spec in wanted.kernels):
        return (
            environment.sys_path,
            environment.cwd,
            sorted(environment.env_vars.items()),
            *_key_parts_of_ops(variables),
        )
    return _key_parts_of_ops(variables)


def _key_parts_of_ops(variables: dict[str, str]) -> tuple[object, ...]:
    return tuple(item for item in sorted(variables.items()) if item[0].startswith(_DECISIVE))


def code_version() -> str:
    """Return a digest that changes when Triton or our kernels do, without importing either."""
    spec = importlib.util.find_spec("stoker_kernels")
    times = []
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in Path(folder).rglob("*.py"):
            with contextlib.suppress(OSError):  # an editor is at work
                times.append(path.stat().st_mtime_ns)
    return digest_of((VERSION, triton_version(), len(times), max(times, default=0)))


async def compile_specs(
    command: list[str],
    specs: bytes,
    variables: dict[str, str],
    cwd: str | None,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """Run the compiler to its end and return its lines: one per kernel, and the sources of functions.

    Its standard input is the lifeline: the process ends itself when we are gone. Its children end
    with it.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            "--stdin",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=variables,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise RuntimeEnvSetupError(
            f"runtime_env.kernels: the compiler cannot be started\n{error}"
        ) from None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            process.stdin.write(specs + b"\n")
            stdout = group.create_task(process.stdout.read())
            stderr = group.create_task(_tail(process.stderr))
            code = await _wait_for_exit(process)
            _kill_group(process.pid)  # a child that is left would hold the pipes
    except TimeoutError:
        raise RuntimeEnvSetupError(
            f"runtime_env.kernels: not compiled within {timeout_s:g} s\n"
            "the setting kernel_compile_timeout_s gives more"
        ) from None
    finally:
        process.stdin.close()
        if process.returncode is None:
            _kill_group(process.pid)
            await _wait_for_exit(process)
    if code != 0:
        tail = stderr.result().decode(errors="replace").splitlines()[-_LINES:]
        raise RuntimeEnvSetupError(
            "runtime_env." + tail[0].removeprefix("error: ").replace("; ", "\n", 1)
            if code == 2 and len(tail) == 1
            else f"runtime_env.kernels: the compiler ended with code {code}\n" + "\n".join(tail)
        )
    try:
        return [msgspec.json.decode(line, type=dict) for line in stdout.result().splitlines()]
    except msgspec.MsgspecError as error:
        raise RuntimeEnvSetupError(
            f"runtime_env.kernels: the compiler's records cannot be read\n{error}"
        ) from None


async def _wait_for_exit(process: asyncio.subprocess.Process) -> int:
    """Return the exit code at once: ``wait`` would also wait for others that hold the pipes."""
    while process.returncode is None:  # noqa: ASYNC110  there is no event
        await asyncio.sleep(_POLL_S)
    return process.returncode


async def _tail(stream: asyncio.StreamReader) -> bytes:
    """Read ``stream`` to its end and return the last of it: a user's function may print without end."""
    last = b""
    while chunk := await stream.read(_TAIL_BYTES):
        last = (last + chunk)[-_TAIL_BYTES:]
    return last


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
