"""Stacks by a signal: a worker's faulthandler writes them into a file in memory that it has open.

This works while a thread in C holds the interpreter, and needs no right but that of a process of the
same user. Nothing is sent to a process that has no handler: the signal would end it.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from pathlib import Path
from typing import BinaryIO

from stoker_wire.errors import ConflictError
from stoker_wire.messages.node_api import (
    MAX_STACK_FRAMES,
    MAX_THREADS,
    STACK_FILE,
    STACK_SIGNAL,
    StackFrame,
    ThreadStack,
)

_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_LOOK_S = 0.01
_MAX_NBYTES = 4 << 20


async def dump(pid: int, timeout_s: float) -> tuple[ThreadStack, ...]:
    """Return the stacks of a worker; ConflictError says why there are none."""
    try:
        with _file_of(pid) as file:
            os.truncate(file.fileno(), 0)
            os.kill(pid, STACK_SIGNAL)
            text = await _written(file, timeout_s)
    except OSError as error:
        raise ConflictError(f"the process cannot be signalled\n{error.strerror}") from None
    threads = threads_of(text)
    if not threads:
        raise ConflictError(f"the process wrote no stacks within {timeout_s:.2g} s")
    return threads


def _file_of(pid: int) -> BinaryIO:
    """Return the file to which a process writes its stacks; ConflictError if it writes none."""
    caught = _CAUGHT.search(Path(f"/proc/{pid}/status").read_text())
    if caught is None or not int(caught[1], 16) & 1 << (STACK_SIGNAL - 1):
        raise ConflictError("the process has no handler for it")
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(fd).startswith(f"/memfd:{STACK_FILE}"):
            return _open(fd)
    raise ConflictError("the process has closed the file for it")


def _open(path: Path) -> BinaryIO:
    """Open a file in memory that a process has open; ConflictError if it is another file by now.

    It is emptied with the rights of this nodelet, which may be root: so it must have no name anywhere.
    """
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        state = os.fstat(found)
        if state.st_nlink or not stat.S_ISREG(state.st_mode):
            raise ConflictError("the process has closed the file for it")
        return open(f"/proc/self/fd/{found}", "r+b", buffering=0)
    finally:
        os.close(found)


async def _written(file: BinaryIO, timeout_s: float) -> str:
    """Return what is in the file once it does not grow any more."""
    until_s = time.monotonic() + timeout_s
    before = -1
    while (size := os.fstat(file.fileno()).st_size) != before or not size:
        if time.monotonic() > until_s:
            break
        before = size
        await asyncio.sleep(_LOOK_S)
    return os.pread(file.fileno(), _MAX_NBYTES, 0).decode(errors="replace")


def threads_of(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of a text by faulthandler, the one that took the signal first."""
    threads: list[tuple[str, list[StackFrame]]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            threads.append((f"thread {thread[2]}", []))
        elif threads and (frame := _FRAME.match(line)):
            number = int(frame[2]) if frame[2].isdigit() else 0
            threads[-1][1].append(StackFrame(function=frame[3], file=frame[1], line=number))
    return tuple(
        ThreadStack(name=name, frames=tuple(frames[:MAX_STACK_FRAMES]))
        for name, frames in threads[:MAX_THREADS]
    )
