"""py-spy, which reads the memory of a Python process from outside: its command lines, and what it says.

It is a program of its own and no dependency: without it, or without the right to trace, its callers
take another way or say what is lacking. A process that it reads is paused for some milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec

from stoker_wire.errors import ConflictError
from stoker_wire.http.auth import SECRETS
from stoker_wire.messages.node_api import (
    MAX_STACK_FRAMES,
    MAX_THREADS,
    ProfileFormat,
    ProfileOptions,
    StackFrame,
    ThreadStack,
)
from stoker_wire.process import process_tree

OFF = "off"
NO_RIGHT = (
    "this node may not trace that process\n"
    "give the nodelet the capability SYS_PTRACE: see docs/profiles.md"
)
NOT_INSTALLED = "py-spy is not installed on this node\ninstall stoker[profile] there"
_FORMATS = {
    ProfileFormat.SVG: "flamegraph",
    ProfileFormat.SPEEDSCOPE: "speedscope",
    ProfileFormat.RAW: "raw",
    ProfileFormat.TRACE: "chrometrace",
}
_REFUSED = ("permission denied", "operation not permitted", "eperm")
_END_S = 1.0
_SAID_CHARACTERS = 300


class _Frame(msgspec.Struct):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Thread(msgspec.Struct):
    pid: int = 0
    thread_id: int = 0
    thread_name: str | None = None
    active: bool = False
    owns_gil: bool = False
    frames: tuple[_Frame, ...] = ()


def find(name: str) -> str | None:
    """Return the path of py-spy, beside this interpreter or on PATH; None if it is not there, or off."""
    if name == OFF:
        return None
    beside = os.path.dirname(sys.executable)
    return shutil.which(name, path=os.pathsep.join((beside, os.environ.get("PATH", os.defpath))))


def record_command(program: str, pid: int, options: ProfileOptions, path: Path) -> list[str]:
    """Return the command that records a process into a file."""
    command = [program, "record", "--pid", str(pid), "--output", str(path)]
    command += ["--duration", str(max(1, round(options.seconds))), "--rate", str(options.rate)]
    command += ["--format", _FORMATS[options.format or ProfileFormat.SVG]]
    command += ["--native"] if options.native else []
    command += ["--gil"] if options.gil else []
    return command


async def dump(program: str, pid: int, timeout_s: float) -> tuple[ThreadStack, ...]:
    """Return the stacks of a process; ConflictError says why there are none."""
    output = await run([program, "dump", "--pid", str(pid), "--json"], pid, timeout_s)
    return threads_of(output)


def threads_of(output: bytes) -> tuple[ThreadStack, ...]:
    """Return the threads of what ``py-spy dump --json`` has printed."""
    try:
        threads = msgspec.json.decode(output, type=tuple[_Thread, ...])
    except msgspec.DecodeError as error:
        raise ConflictError(f"py-spy said what cannot be read\n{error}") from None
    return tuple(
        ThreadStack(
            name=one.thread_name or f"thread {one.thread_id}",
            frames=tuple(
                StackFrame(function=frame.name, file=frame.filename, line=frame.line)
                for frame in one.frames[:MAX_STACK_FRAMES]
            ),
            active=one.active,
            holds_gil=one.owns_gil,
        )
        for one in threads[:MAX_THREADS]
    )


async def run(command: list[str], pid: int, timeout_s: float) -> bytes:
    """Run py-spy on a process; return its output. However it ends, the process goes on."""
    environ = {name: value for name, value in os.environ.items() if name not in SECRETS}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**environ, "RUST_BACKTRACE": "0"},
        )
    except OSError as error:
        raise ConflictError(f"py-spy cannot be started\n{error}") from None
    try:
        async with asyncio.timeout(timeout_s):
            output, said = await process.communicate()
    except (TimeoutError, asyncio.CancelledError) as error:
        await _end(process, pid)
        if isinstance(error, TimeoutError):
            raise ConflictError(f"py-spy was not done within {timeout_s:.2g} s") from None
        raise
    if process.returncode != 0:
        raise ConflictError(why(said.decode(errors="replace")))
    return output


async def _end(process: asyncio.subprocess.Process, pid: int) -> None:
    """End py-spy; it lets go of the process by itself, unless it does not even end on its own."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    # A tracer that was killed while it attached leaves a stop behind.
    if process_tree.is_stopped(pid):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def why(said: str) -> str:
    """Return why py-spy has failed, from what it said."""
    if any(word in said.lower() for word in _REFUSED):
        return NO_RIGHT
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    reason = (errors or lines or ["it said nothing"])[0]
    return f"py-spy failed\n{reason[:_SAID_CHARACTERS]}"


def python_pid(pid: int) -> int:
    """Return the first Python process from ``pid`` down, as a driver may be a shell; else ``pid``."""
    for one in (pid, *process_tree.descendants(pid)):
        with contextlib.suppress(OSError):
            program = Path(f"/proc/{one}/cmdline").read_bytes().partition(b"\0")[0]
            if os.path.basename(program).startswith(b"python"):
                return one
    return pid
