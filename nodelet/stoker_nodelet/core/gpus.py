"""The way of a GPU from one lease to the next: it is free only when its memory is.

When its last worker is gone, a GPU that can be measured stays taken until a reading shows that no process
has memory on it. If one still has after ``Policy.gpu_free_s`` the GPU is quarantined until that process is
gone; after an error of its own it is until an operator says otherwise. Handlers of ``machine``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from stoker_nodelet.core.commands import Outbox, ReadGpus, ReportGpus

if TYPE_CHECKING:
    from stoker_nodelet.core.events import GpuReading, GpuReleased, GpusRead, WorkerExited
    from stoker_nodelet.core.state import GpuEntry, State

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors of the driver that a program causes: the GPU is as good as before (Kubernetes' list)."""


def obstacle(state: State, index: int, *, with_left: bool) -> str:
    """Return why the GPU cannot be used now, or nothing; ``with_left`` also while its memory is not free."""
    gpu = state.gpus.get(index)
    if gpu is None:
        return ""
    if gpu.quarantine:
        return f"GPU {index} is quarantined: {gpu.quarantine}"
    if with_left and gpu.left_at_s is not None:
        return f"GPU {index} was left, and its memory is not free yet"
    return ""


def refusal(state: State, indices: Iterable[int]) -> str:
    """Return why a lease that awaits GPUs does not get them, or nothing."""
    return next(filter(None, (obstacle(state, one, with_left=False) for one in indices)), "")


def left(state: State, event: WorkerExited, outbox: Outbox) -> None:
    """Note the GPUs of which the worker that exits is the last one."""
    worker = state.workers.get(event.worker_id)
    for index in worker.gpus if worker is not None else ():
        gpu = state.gpus.get(index)
        if gpu is None or gpu.residents is None or gpu.quarantine:
            continue
        if any(index in other.gpus for other in state.workers.values() if other is not worker):
            continue
        gpu.left_at_s, gpu.held = event.at_s, ""
        outbox.append(ReadGpus())


def read(state: State, event: GpusRead, outbox: Outbox) -> None:
    """Free the GPUs whose memory is free, and quarantine those with an error."""
    before = _quarantined(state)
    for index, reading in event.readings.items():
        gpu = state.gpus.get(index)
        if gpu is not None:
            _apply(gpu, reading, event.at_s)
    _report(state, before, outbox)
    expire(state, event.at_s, outbox)


def _apply(gpu: GpuEntry, reading: GpuReading, at_s: float) -> None:
    fault = _fault(gpu, reading)
    if reading.ecc_errors is not None:
        gpu.ecc_errors = reading.ecc_errors
    if fault:
        gpu.quarantine, gpu.is_faulty, gpu.left_at_s = fault, True, None
    if reading.processes is None:
        return
    gpu.pids = frozenset(reading.processes)
    # One that has ended is forgotten: its pid may be given again.
    gpu.residents = gpu.pids if gpu.residents is None else gpu.residents & gpu.pids
    if gpu.is_faulty or (gpu.left_at_s is None and not gpu.quarantine):
        return
    if gpu.left_at_s is not None and at_s < gpu.left_at_s:
        return  # its last worker was still there, and may have had no memory yet
    held = {pid: n for pid, n in reading.processes.items() if pid not in gpu.residents}
    if held:
        gpu.held = _held_text(held)
    else:
        gpu.left_at_s, gpu.held, gpu.quarantine = None, "", ""


def _fault(gpu: GpuEntry, reading: GpuReading) -> str:
    """Return in words what is wrong with the GPU itself, or nothing."""
    if reading.lost:
        return f"the driver has lost it ({reading.lost})"
    xids = [xid for xid in reading.xids if xid not in APPLICATION_XIDS]
    if xids:
        return f"the driver reported XID {xids[-1]}"
    before, now = gpu.ecc_errors, reading.ecc_errors
    if before is not None and now is not None and now > before:
        return f"uncorrectable ECC errors rose from {before} to {now}"
    return ""


def _held_text(held: Mapping[int, int]) -> str:
    nbytes, pids = sum(held.values()), sorted(held, key=lambda pid: (-held[pid], pid))
    more = f" and {len(pids) - 1} more" if len(pids) > 1 else ""
    return f"{nbytes / (1 << 30):.1f} GiB are still allocated by pid {pids[0]}{more}"


def expire(state: State, at_s: float, outbox: Outbox) -> None:
    """Quarantine the GPUs whose memory was not free in time."""
    before = _quarantined(state)
    for gpu in state.gpus.values():
        if gpu.left_at_s is not None and at_s - gpu.left_at_s > state.policy.gpu_free_s:
            gpu.quarantine = gpu.held or "nobody can tell whether its memory is free"
            gpu.left_at_s = None
    _report(state, before, outbox)


def release(state: State, event: GpuReleased, outbox: Outbox) -> None:
    """Put a quarantined GPU back to use; the processes that are there do not count from now on."""
    gpu = state.gpus.get(event.index)
    if gpu is None or not gpu.quarantine:
        return
    before = _quarantined(state)
    gpu.residents = gpu.pids | (gpu.residents or frozenset())
    gpu.quarantine, gpu.held, gpu.is_faulty = "", "", False
    _report(state, before, outbox)


def _quarantined(state: State) -> dict[int, str]:
    return {index: gpu.quarantine for index, gpu in state.gpus.items() if gpu.quarantine}


def _report(state: State, before: Mapping[int, str], outbox: Outbox) -> None:
    if _quarantined(state) != before:
        outbox.append(ReportGpus())
