"""py-spy: its commands, what it says, and a process that it is not allowed to read."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stoker_nodelet.profiles import py_spy
from stoker_wire.errors import ConflictError
from stoker_wire.messages.node_api import (
    MAX_STACK_FRAMES,
    MAX_THREADS,
    ProfileFormat,
    ProfileOptions,
    StackFrame,
)

DUMP = b"""[{"pid": 7, "thread_id": 1, "thread_name": "MainThread", "os_thread_id": 7, "active": true,
"owns_gil": false, "frames": [{"name": "inner", "filename": "/a.py", "module": null, "line": 4,
"locals": null, "is_entry": false}, {"name": "outer", "filename": "/a.py", "line": 9}],
"process_info": null}, {"pid": 7, "thread_id": 22, "thread_name": null, "frames": []}]"""


def test_a_dump_is_read_with_the_innermost_function_first() -> None:
    main, other = py_spy.threads_of(DUMP)
    assert main.name == "MainThread"
    assert (main.active, main.holds_gil) == (True, False)
    assert main.frames == (
        StackFrame(function="inner", file="/a.py", line=4),
        StackFrame(function="outer", file="/a.py", line=9),
    )
    assert other.name == "thread 22"


def test_a_dump_is_bounded() -> None:
    thread = {"frames": [{"name": "deep"}] * (MAX_STACK_FRAMES + 1)}
    threads = py_spy.threads_of(msgspec.json.encode([thread] * (MAX_THREADS + 1)))
    assert len(threads) == MAX_THREADS
    assert len(threads[0].frames) == MAX_STACK_FRAMES


def test_what_is_no_dump_is_an_error() -> None:
    with pytest.raises(ConflictError, match="what cannot be read"):
        py_spy.threads_of(b"Thread 1 (idle)")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Permission Denied: Try running again with elevated permissions", py_spy.NO_RIGHT),
        ("Error: Operation not permitted (os error 1)", py_spy.NO_RIGHT),
        ("\nError: Failed to find python version\nReason: x", "py-spy failed\nFailed to find python version"),
        ("", "py-spy failed\nit said nothing"),
    ],
)  # fmt: skip
def test_why_it_failed_is_told_in_one_line(said: str, expected: str) -> None:
    assert py_spy.why(said) == expected


def test_a_recording_has_all_that_was_asked_for() -> None:
    options = ProfileOptions(
        seconds=2.4, rate=50, native=True, gil=True, format=ProfileFormat.TRACE
    )
    command = py_spy.record_command("/bin/py-spy", 7, options, Path("/tmp/out"))
    assert command == [
        "/bin/py-spy", "record", "--pid", "7", "--output", "/tmp/out", "--duration", "2",
        "--rate", "50", "--format", "chrometrace", "--native", "--gil",
    ]  # fmt: skip
    least = py_spy.record_command("py-spy", 7, ProfileOptions(seconds=0.1), Path("out"))
    assert least[least.index("--duration") + 1] == "1", "0 would be without end"


def test_it_is_found_beside_this_interpreter_before_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
        (folder / "spy").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(ours / "python"))
    monkeypatch.setenv("PATH", str(theirs))
    assert py_spy.find("spy") == str(ours / "spy")
    (ours / "spy").unlink()
    assert py_spy.find("spy") == str(theirs / "spy")
    assert py_spy.find(str(ours / "spy")) is None
    assert py_spy.find(py_spy.OFF) is None


def test_a_shell_leads_to_the_python_that_it_has_started() -> None:
    script = f"{sys.executable} -c 'print(1, flush=True); input()'; true"
    shell = subprocess.Popen(
        ["/bin/sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    with shell.stdin, shell.stdout:
        shell.stdout.readline()
        found = py_spy.python_pid(shell.pid)
        command = Path(f"/proc/{found}/cmdline").read_bytes()
        shell.stdin.write(b"\n")
    shell.wait(10)
    assert found != shell.pid
    assert command.startswith(os.fsencode(sys.executable))


def test_one_that_is_too_slow_is_ended_and_the_process_goes_on(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\ntrap "" INT\nkill -STOP "$1"\nsleep 60 &\nwait; sleep 60\n')
    slow.chmod(0o755)
    victim = subprocess.Popen(["sleep", "60"])
    try:
        with pytest.raises(ConflictError, match="was not done within"):
            asyncio.run(py_spy.run([str(slow), str(victim.pid)], victim.pid, 0.5))
        state = Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "T"
    finally:
        victim.kill()
        victim.wait(10)
