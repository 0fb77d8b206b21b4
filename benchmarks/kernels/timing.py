"""Times one function on a device: median with 20 and 80 % quantiles, and the memory it needs at its peak."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

CPU_ROUNDS = 5
GPU_BUDGET_MS = 200


class Timing(NamedTuple):
    """Milliseconds of one call, and bytes allocated at its peak beyond what was there (NaN on a CPU)."""

    median_ms: float
    low_ms: float
    high_ms: float
    peak_nbytes: float


def timed(function: Callable[[], object], device: str, clear: Callable[[], object]) -> Timing:
    """Time ``function``; ``clear`` runs before every call, untimed (it drops gradients).

    On a GPU each call finds an empty second-level cache, as in a training step.
    """
    if device == "cpu":
        return _timed_on_cpu(function, clear)
    return _timed_on_gpu(function, clear)


def _timed_on_cpu(function: Callable[[], object], clear: Callable[[], object]) -> Timing:
    times = []
    for _ in range(CPU_ROUNDS + 1):
        clear()
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * 1e3)
    low, median, high = _quantiles(times[1:])  # the first call warms up
    return Timing(median, low, high, float("nan"))


def _timed_on_gpu(function: Callable[[], object], clear: Callable[[], object]) -> Timing:
    clear()
    function()  # compiles
    clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    once_ms = (time.perf_counter() - start) * 1e3
    peak = torch.cuda.max_memory_allocated() - before
    # Larger than any second-level cache.
    cache = torch.empty(256 * 2**20, dtype=torch.int8, device=device_name())
    rounds = max(10, min(200, int(GPU_BUDGET_MS / max(once_ms, 1e-3))))
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(rounds)
    ]
    for begin, end in events:
        clear()
        cache.zero_()
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    low, median, high = _quantiles([begin.elapsed_time(end) for begin, end in events])
    return Timing(median, low, high, float(peak))


def _quantiles(times: list[float]) -> tuple[float, float, float]:
    """Return the 20 %, 50 % and 80 % quantiles."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return fifths[0], statistics.median(times), fifths[3]


def device_name() -> str:
    """Return the device to measure on when none is named."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Ceilings(NamedTuple):
    """What this device can do at most, measured: copying bytes and multiplying bf16 matrices."""

    copy_nbytes_per_s: float
    matmul_flops_per_s: float


def ceilings(device: str) -> Ceilings:
    """Measure a large copy (bytes read plus bytes written) and a large matrix product on random data."""
    # A CPU without bf16 units multiplies some 10**8 pairs per second.
    nbytes, n = (4 * 2**30, 8192) if device != "cpu" else (2**27, 256)
    copied = _copy_timing(device, nbytes)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = timed(lambda: a @ b, device, _nothing)
    return Ceilings(2 * nbytes / copied.median_ms * 1e3, 2 * n**3 / product.median_ms * 1e3)


def _copy_timing(device: str, nbytes: int) -> Timing:
    source = torch.randint(0, 127, (nbytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), device, _nothing)


def _nothing() -> None:
    return None
