"""The operators and kernels that this process executes while it records itself, by torch.profiler.

A profiler is started and stopped in one thread, by default sees that thread alone, and there is one of
them in a process: torch ends the process where two meet. So this one is told to see all threads, is not
started beside one of the program, and ends at once when the program starts its own meanwhile.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from stoker_wire.errors import ConflictError

if TYPE_CHECKING:
    from pathlib import Path

_IMPORT_S = 30.0
_LOOK_S = 0.05
_SETTLE_S = 0.2
_YIELD_S = 10.0
"""The program's own profiler waits no longer for the end of ours."""
_BUSY = "the program has a torch.profiler of its own\nsee what that one records"


def record_torch(seconds: float, folder: Path, stop: threading.Event) -> Path:
    """Record operators for so long; return the trace, for chrome://tracing and Perfetto."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise ConflictError(
            "this worker has not imported torch, so there is nothing to trace\n"
            "take a cpu profile of it"
        )
    until_s = time.monotonic() + _IMPORT_S
    while torch.__spec__._initializing and time.monotonic() < until_s:
        stop.wait(_LOOK_S)
    try:
        import torch.autograd.profiler as autograd_profiler
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        config = _ExperimentalConfig(profile_all_threads=True)
        autograd: Any = autograd_profiler
        is_busy = autograd._prepare_profiler is None or autograd._is_profiler_enabled
    except (ImportError, AttributeError, TypeError) as error:
        raise ConflictError(
            f"torch {torch.__version__} cannot trace all threads\n{error}\n"
            "use torch 2.6 or newer in this worker"
        ) from None
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, profile_memory=True, experimental_config=config)
    with _GivingWay(autograd, stop) as ours:
        stop.wait(_SETTLE_S)  # one that was being prepared before is there by then
        if is_busy or autograd._is_profiler_enabled:
            raise ConflictError(_BUSY)
        profiler.start()
        try:
            stop.wait(seconds)
        finally:
            profiler.stop()
    if ours.gave_way:
        raise ConflictError(_BUSY)
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    return path


class _GivingWay:
    """The span of our profiler: one that the program prepares meanwhile waits, and ends it."""

    def __init__(self, autograd: Any, stop: threading.Event) -> None:
        self.gave_way = False
        self._autograd = autograd
        self._stop = stop
        self._prepare = autograd._prepare_profiler
        self._thread = threading.get_ident()
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._autograd._prepare_profiler = self._prepare_after
        return self

    def _prepare_after(self, *args: Any, **options: Any) -> Any:
        if threading.get_ident() != self._thread and not self._ended.is_set():
            self.gave_way = True
            self._stop.set()
            self._ended.wait(_YIELD_S)
        return self._prepare(*args, **options)

    def __exit__(self, *_: object) -> None:
        self._autograd._prepare_profiler = self._prepare
        self._ended.set()
