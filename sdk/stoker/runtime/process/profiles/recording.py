"""Recordings that a process makes of itself, on order: memory by memray, operators by torch.profiler.

Both are of the whole process, so one is made at a time. What cannot be recorded is refused with what is
lacking; the program goes on as before.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from stoker_wire.errors import ConflictError, StokerError
from stoker_wire.messages.node_api import ProfileKind

if TYPE_CHECKING:
    from pathlib import Path

_one = threading.Lock()


def record(kind: ProfileKind, seconds: float, folder: Path, stop: threading.Event) -> Path:
    """Record this process for so long, or until ``stop``, in a thread of its own; return the report."""
    if not _one.acquire(blocking=False):
        raise ConflictError("this process records itself already\ntake one profile at a time")
    try:
        if kind is ProfileKind.MEMORY:
            from stoker.runtime.process.profiles.memory import record_memory

            return record_memory(seconds, folder, stop)
        from stoker.runtime.process.profiles.torch_trace import record_torch

        return record_torch(seconds, folder, stop)
    except StokerError:
        raise
    except Exception as error:  # of a profiler, which this program did not ask for
        raise ConflictError(
            f"the {kind} profiler has failed\n{type(error).__name__}: {error}"
        ) from error
    finally:
        _one.release()
