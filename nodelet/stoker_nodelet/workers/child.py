"""What a process that was just forked does: it becomes a worker, or another program.

Only :mod:`stoker_nodelet.workers.forkserver` calls it, in the child. Nothing here may rely on a thread.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from stoker_wire.process.search_path import apply_path

if TYPE_CHECKING:
    from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Call prctl(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


def run_child(request: dict[str, Any], target: Callable[[Any], None], parent: int) -> None:
    """Become a worker (or, with ``argv``, another program). Never returns."""
    code = 1
    try:
        _settle(request, parent)
        if request["argv"]:
            os.execvpe(request["argv"][0], request["argv"], os.environ)
        _be_a_fresh_interpreter(request)
        import msgspec

        from stoker_wire.messages.cluster import WorkerBoot

        target(msgspec.msgpack.decode(request["boot"], type=WorkerBoot))
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if isinstance(leave.code, str):
            sys.stderr.write(f"{leave.code}\n")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        _leave(code)


def _settle(request: dict[str, Any], parent: int) -> None:
    """Own session and process group, die with the fork server, log file, environment, cwd."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(request["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    os.environ.update(request["env"])
    if request["cwd"]:
        os.chdir(request["cwd"])


def _be_a_fresh_interpreter(request: dict[str, Any]) -> None:
    """Undo what a fork copies and a started interpreter would have of its own."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    gc.enable()
    apply_path(request["sys_path"])
    if "random" in sys.modules:
        sys.modules["random"].seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _leave(code: int) -> None:
    import atexit

    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
