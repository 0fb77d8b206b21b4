"""The cluster at one moment, as ``stoker top`` shows it: a few requests, however large it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stoker.cli.lists import fetch_newest
from stoker_wire.errors import StokerError
from stoker_wire.http.dashboard.figures import Overview, TaskSummary
from stoker_wire.messages.cluster import ClusterResources

if TYPE_CHECKING:
    from stoker.cli.tables import Row
    from stoker.runtime.net.http import HttpClient

JOBS = 10
"""Jobs whose tasks are counted, the newest."""
LEASES = 1000
CALL_S = 10.0


class NodeNow(msgspec.Struct):
    """A node: how much of what leases hold, and what is measured there."""

    node_id: str
    hostname: str
    state: str
    total: dict[str, float]
    used: dict[str, float]
    cpu_percent: float | None = None
    memory_bytes: float | None = None

    @property
    def load(self) -> float:
        """The largest part of its CPUs, GPUs or memory that is held, with 1 for all of it."""
        parts = [
            self.used.get(name, 0.0) / most
            for name, most in self.total.items()
            if most and name in ("CPU", "GPU", "memory")
        ]
        return max(parts, default=0.0)


class GpuNow(msgspec.Struct):
    """A GPU: how much of it leases hold, whose these are, and what is measured."""

    node_id: str
    index: int
    name: str
    held: float
    holders: list[str]
    percent: float | None = None
    memory_bytes: float | None = None
    memory_total_bytes: float = 0.0
    quarantine: str = ""


class JobNow(msgspec.Struct):
    """A job that has not ended, with the attempts of its tasks by state."""

    job_id: str
    name: str
    state: str
    user: str
    queue: str
    since_s: float
    tasks: dict[str, int] = {}


class Snapshot(msgspec.Struct):
    """The cluster at one moment: the most loaded nodes and GPUs first, the newest jobs first."""

    address: str
    overview: Overview
    nodes: list[NodeNow]
    gpus: list[GpuNow]
    jobs: list[JobNow]


def collect(client: HttpClient) -> Snapshot:
    """Ask for all of it; what the scheduler cannot say just now is left out."""
    overview = client.call("GET", "/v1/overview", reply=Overview, timeout_s=CALL_S)
    rows = fetch_newest(client, "/v1/nodes", None, {"state": "ALIVE,SUSPECT"}).items
    resources = None
    leases: list[Row] = []
    if not overview.missing:
        try:
            resources = client.call("GET", "/v1/cluster", reply=ClusterResources, timeout_s=CALL_S)
            if any(row.get("devices") for row in rows):
                leases = fetch_newest(client, "/v1/leases", LEASES, {}).items
        except StokerError:
            resources = None
    return Snapshot(
        address=client.base_url,
        overview=overview,
        nodes=nodes_now(rows, resources),
        gpus=gpus_now(rows, leases),
        jobs=_jobs(client),
    )


def nodes_now(rows: list[Row], resources: ClusterResources | None) -> list[NodeNow]:
    """Return the nodes, the most loaded first."""
    found = []
    for row in rows:
        node_id, usage = row["node_id"], row.get("usage") or {}
        total: dict[str, float] = row["resources"]
        used: dict[str, float] = {}
        if resources is not None and node_id in resources.nodes:
            total = resources.nodes[node_id]
            free = resources.nodes_available.get(node_id, {})
            used = {name: most - free.get(name, 0.0) for name, most in total.items()}
        found.append(
            NodeNow(
                node_id=node_id,
                hostname=row.get("hostname", ""),
                state=row["state"],
                total=total,
                used=used,
                cpu_percent=usage.get("cpu_percent"),
                memory_bytes=usage.get("memory_bytes"),
            )
        )
    return sorted(found, key=lambda node: (-node.load, -(node.cpu_percent or 0.0), node.node_id))


def gpus_now(rows: list[Row], leases: list[Row]) -> list[GpuNow]:
    """Return the GPUs of all nodes, those that are held and busy first."""
    holders: dict[tuple[str, int], list[str]] = {}
    for lease in leases:
        for index in lease.get("gpus") or {}:
            who = holders.setdefault((lease["node_id"], int(index)), [])
            text = _holder(lease)
            if text not in who:
                who.append(text)
    found = []
    for row in rows:
        usage = row.get("usage") or {}
        for device in row.get("devices") or ():
            index = int(device["index"])
            found.append(
                GpuNow(
                    node_id=row["node_id"],
                    index=index,
                    name=device["name"],
                    held=usage.get(f"gpu{index}_held", 0.0),
                    holders=holders.get((row["node_id"], index), []),
                    percent=usage.get(f"gpu{index}_percent"),
                    memory_bytes=usage.get(f"gpu{index}_memory_bytes"),
                    memory_total_bytes=device.get("memory_bytes", 0),
                    quarantine=device.get("quarantine", ""),
                )
            )
    return sorted(
        found,
        key=lambda gpu: (
            -max(gpu.held, bool(gpu.holders)),
            -(gpu.percent or 0.0),
            gpu.node_id,
            gpu.index,
        ),
    )


def _holder(lease: Row) -> str:
    what = lease.get("name") or lease.get("actor_id") or lease.get("kind", "")
    return f"{what} of {lease['job_id']}" if lease.get("job_id") else str(what)


def _jobs(client: HttpClient) -> list[JobNow]:
    page = fetch_newest(client, "/v1/jobs", JOBS, {"state": "PENDING,RUNNING"})
    return [_job(client, row) for row in page.items]


def _job(client: HttpClient, row: dict[str, Any]) -> JobNow:
    job_id = row["job_id"]
    tasks = client.call(
        "GET",
        "/v1/tasks/summary",
        reply=TaskSummary,
        query={"job_id": job_id, "limit": 1},
        timeout_s=CALL_S,
    )
    return JobNow(
        job_id=job_id,
        name=row.get("name") or row.get("entrypoint", ""),
        state=row["state"],
        user=row.get("user", ""),
        queue=row.get("queue", ""),
        since_s=row.get("started_at_s") or row["created_at_s"],
        tasks=tasks.states,
    )
