"""The metrics of a nodelet, read from its parts when somebody asks."""

from __future__ import annotations

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker_nodelet.core import WorkerPhase
from stoker_nodelet.core.memory import Watermarks
from stoker_nodelet.core.state import LeasePhase
from stoker_nodelet.devices import limits, memory
from stoker_nodelet.objects.eviction import ArenaEvictor
from stoker_nodelet.telemetry.metrics import machine
from stoker_nodelet.telemetry.task_spool import TaskSpool
from stoker_nodelet.transfer import Transfer
from stoker_nodelet.workers.workers import Workers
from stoker_wire.messages.cluster import Device

if TYPE_CHECKING:
    from stoker_nodelet.core.memory import Disk
    from stoker_wire.process.metrics import Metrics

_PERCENT = 100.0
_PHASES = {
    WorkerPhase.STARTING: "starting",
    WorkerPhase.IDLE: "idle",
    WorkerPhase.LEASED: "leased",
    WorkerPhase.RETIRING: "retiring",
    WorkerPhase.TERMINATING: "ending",
}


@dataclass(frozen=True, slots=True)
class NodeMetrics:
    """The parts of a node that have something to show. ``disks`` are folders by what they are for."""

    workers: Workers
    evictor: ArenaEvictor
    transfer: Transfer
    spool: TaskSpool
    watermarks: Watermarks
    devices: tuple[Device, ...]
    disks: dict[str, Path]

    def add_to(self, metrics: Metrics) -> None:
        """Show all."""
        for show in (self._machine, self._workers, self._objects, self._gpus, self._jobs):
            show(metrics)

    def _machine(self, metrics: Metrics) -> None:
        show, cgroups = metrics.show, memory.limited_cgroups()
        node_id, hostname = self.workers.identity.node_id, socket.gethostname()
        show("stoker_node_info", lambda: {(node_id, hostname): 1})
        show("stoker_node_cpus", limits.usable_cpus)
        show("stoker_node_cpu_seconds_total", machine.cpu_seconds)
        show("stoker_node_load1", lambda: os.getloadavg()[0])
        show("stoker_node_memory_capacity_bytes", lambda: memory.node_memory(cgroups).total_bytes)
        show("stoker_node_memory_used_bytes", lambda: memory.node_memory(cgroups).used_bytes)
        show("stoker_node_disk_capacity_bytes", lambda: self._of_disks(lambda d: d.total_bytes))
        show("stoker_node_disk_free_bytes", lambda: self._of_disks(lambda d: d.free_bytes))
        show("stoker_node_disk_read_bytes_total", lambda: machine.disk_traffic().in_nbytes)
        show("stoker_node_disk_written_bytes_total", lambda: machine.disk_traffic().out_nbytes)
        show(
            "stoker_node_network_received_bytes_total", lambda: machine.network_traffic().in_nbytes
        )
        show("stoker_node_network_sent_bytes_total", lambda: machine.network_traffic().out_nbytes)
        show("stoker_node_pressure", self._pressure)

    def _of_disks(self, read: Callable[[Disk], int]) -> dict[str, int]:
        return {name: read(memory.disk(folder)) for name, folder in self.disks.items()}

    def _pressure(self) -> dict[str, int]:
        marks = self.watermarks
        return {"memory": int(bool(marks.memory)), "disk": int(bool(marks.disk))}

    def _workers(self, metrics: Metrics) -> None:
        show, counts, spool = metrics.show, self.workers.counts, self.spool
        show("stoker_workers", self._worker_phases)
        show("stoker_worker_starts_total", lambda: counts.starts)
        show("stoker_worker_start_seconds", lambda: counts.start_s)
        show("stoker_worker_exits_total", lambda: counts.exits)
        show("stoker_node_leases", self._lease_phases)
        show("stoker_task_records_forwarded_total", lambda: spool.forwarded)
        show("stoker_task_records_dropped_total", lambda: spool.dropped)

    def _worker_phases(self) -> dict[str, int]:
        phases = Counter(worker.phase for worker in self.workers.state.workers.values())
        return {name: phases[phase] for phase, name in _PHASES.items()}

    def _lease_phases(self) -> dict[str, int]:
        phases = Counter(lease.phase for lease in self.workers.state.leases.values())
        return {phase.value: phases[phase] for phase in LeasePhase}

    def _objects(self, metrics: Metrics) -> None:
        show, evictor, transfer = metrics.show, self.evictor, self.transfer
        quota, objects = evictor.arena.quota, evictor.objects
        show("stoker_arena_capacity_bytes", lambda: quota.limit_bytes)
        show("stoker_arena_used_bytes", lambda: quota.used_bytes)
        show("stoker_arena_objects", lambda: len(objects))
        show("stoker_arena_object_bytes", lambda: objects.nbytes)
        show("stoker_arena_disk_bytes", lambda: objects.spilled_bytes)
        show("stoker_arena_spilled_objects_total", lambda: evictor.spilled_count)
        show("stoker_arena_spilled_bytes_total", lambda: evictor.spilled_nbytes)
        show("stoker_transfers_active", lambda: transfer.active)
        show("stoker_transfers_total", lambda: transfer.counts.outcomes)
        show("stoker_transfer_seconds", lambda: transfer.counts.seconds)
        show("stoker_transfer_received_bytes_total", lambda: transfer.received_nbytes)
        show("stoker_transfer_sent_bytes_total", lambda: transfer.server.sent_nbytes)

    def _gpus(self, metrics: Metrics) -> None:
        show, state = metrics.show, self.workers.state
        show("stoker_gpus", lambda: len(self.devices))
        show("stoker_gpu_utilization_ratio", lambda: self._measured("percent", 1 / _PERCENT))
        show("stoker_gpu_memory_used_bytes", lambda: self._measured("memory_bytes"))
        show(
            "stoker_gpu_memory_capacity_bytes",
            lambda: {str(one.index): one.memory_bytes for one in self.devices},
        )
        show("stoker_gpu_temperature_celsius", lambda: self._measured("temperature_celsius"))
        show("stoker_gpu_power_watts", lambda: self._measured("power_watts"))
        show("stoker_gpu_ecc_errors_total", lambda: self._measured("ecc_errors"))
        show("stoker_gpu_allocated_ratio", self._holders)
        show(
            "stoker_gpu_quarantined",
            lambda: {str(index): int(bool(gpu.quarantine)) for index, gpu in state.gpus.items()},
        )

    def _measured(self, what: str, factor: float = 1.0) -> dict[str, float]:
        usage = self.workers.gpus.usage
        names = {str(one.index): f"gpu{one.index}_{what}" for one in self.devices}
        return {index: usage[name] * factor for index, name in names.items() if name in usage}

    def _holders(self) -> dict[tuple[str, str], float]:
        held: dict[tuple[str, str], float] = defaultdict(float)
        for worker in self.workers.state.workers.values():
            for index, share in worker.gpus.items():
                held[str(index), worker.job_id] += share
        return held

    def _jobs(self, metrics: Metrics) -> None:
        usage, state = self.workers.usage, self.workers.state

        metrics.measure_first(lambda: usage.measure(state.workers.values()))
        metrics.show("stoker_job_cpu_seconds_total", lambda: usage.cpu_s)
        metrics.show("stoker_job_gpu_seconds_total", lambda: usage.gpu_s)
