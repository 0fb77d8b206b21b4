"""Stacks by a signal: the text of faulthandler, and that nobody is ended who has no handler."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stoker_nodelet.profiles import faulthandler_stacks
from stoker_wire.errors import ConflictError
from stoker_wire.messages.node_api import STACK_FILE, StackFrame

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """Thread 0x00007f2 (most recent call first):
  File "/lib/selectors.py", line 468 in select
  <truncated rest of calls>

Current thread 0x00007f3 (most recent call first):
  File "/home/a b/work.py", line 12 in hold
  File "/home/a b/work.py", line ??? in <module>
"""
HANDLES = """
from stoker.runtime.process.profiles.stack_signal import write_stacks_at_signal
def waits_in_this_function():
    print("ready", flush=True)
    input()
write_stacks_at_signal()
waits_in_this_function()
print("unharmed")
"""


def test_the_text_is_read_thread_by_thread() -> None:
    other, current = faulthandler_stacks.threads_of(TEXT)
    assert other.name == "thread 0x00007f2"
    assert other.frames == (StackFrame(function="select", file="/lib/selectors.py", line=468),)
    assert [frame.function for frame in current.frames] == ["hold", "<module>"]
    assert current.frames[0].file == "/home/a b/work.py"
    assert current.frames[1].line == 0
    assert faulthandler_stacks.threads_of("") == ()


def test_a_process_without_a_handler_gets_no_signal() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(ConflictError, match="no handler"):
            asyncio.run(faulthandler_stacks.dump(process.pid, 1.0))
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(10)


def test_a_file_that_a_process_puts_in_place_of_its_own_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("of root")
    with precious.open() as file:
        process = subprocess.Popen(
            [sys.executable, "-c", HANDLES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[file.fileno()],
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            monkeypatch.setattr(faulthandler_stacks.os, "readlink", _as_it_was(file.fileno()))
            with pytest.raises(ConflictError, match="has closed the file"):
                asyncio.run(faulthandler_stacks.dump(process.pid, 5.0))
        finally:
            process.kill()
            process.communicate(timeout=10)
    assert precious.read_text() == "of root"


def _as_it_was(swapped: int) -> Any:
    """A look at the names of a process's files just before it puts another in the place of one."""

    def readlink(path: os.PathLike[str]) -> str:
        number = int(os.path.basename(path))
        return f"/memfd:{STACK_FILE} (deleted)" if number == swapped else "/dev/null"

    return readlink


def test_a_process_that_has_ended_is_an_error() -> None:
    process = subprocess.Popen(["true"])
    process.wait(10)
    with pytest.raises(ConflictError, match="cannot be signalled"):
        asyncio.run(faulthandler_stacks.dump(process.pid, 1.0))


def test_a_process_writes_its_stacks_again_and_again_and_goes_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HANDLES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for _ in range(3):
        threads = asyncio.run(faulthandler_stacks.dump(process.pid, 20.0))
        names = [frame.function for thread in threads for frame in thread.frames]
        assert names.count("waits_in_this_function") == 1
    said, _ = process.communicate("\n", timeout=20)
    assert said == "unharmed\n"
