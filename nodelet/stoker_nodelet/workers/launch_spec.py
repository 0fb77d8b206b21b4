"""What a fork needs: turns a lease and its environment into a request to the fork server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker_nodelet.devices import visible_mask
from stoker_nodelet.environments.environments import Environment
from stoker_nodelet.kernels.cache import TRITON_VARIABLE
from stoker_nodelet.workers.fork_client import ForkRequest
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import Lease, WorkerBoot, WorkerSpec

if TYPE_CHECKING:
    from stoker_nodelet.identity import Identity


@dataclass(frozen=True, slots=True)
class Order:
    """A lease with all that its worker needs to know."""

    lease: Lease
    spec: WorkerSpec
    environment: Environment
    output_dir: str = ""

    @property
    def name(self) -> str:
        """What the worker's output is labelled with."""
        if self.spec.driver is not None:
            return "driver"
        return self.spec.actor.class_name if self.spec.actor else self.lease.name

    def variables(self, identity: Identity) -> dict[str, str]:
        """Return the environment variables of the lease: its devices, threads and cache, the job's own."""
        cpus = self.lease.resources.get("CPU", 0.0)
        variables = {"CUDA_VISIBLE_DEVICES": visible_mask(self.lease.gpus)}
        if self.lease.gpus and not identity.fake_gpus:
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order that NVML counts in
        if identity.triton_dir:
            variables[TRITON_VARIABLE] = identity.triton_dir
        if "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = str(max(1, int(cpus)))
        if self.output_dir:
            variables["STOKER_JOB_OUTPUT_DIR"] = self.output_dir
        return {**variables, **self.environment.env_vars}


def _names(identity: Identity, worker_id: str) -> dict[str, str]:
    return {
        "STOKER_NODE_ID": identity.node_id,
        "STOKER_WORKER_ID": worker_id,
        "STOKER_SESSION_DIR": str(identity.session_dir),
    }


def worker_request(identity: Identity, worker_id: str, order: Order | None) -> ForkRequest:
    """Return the fork of a worker; without an order it is a fresh one, to be assigned later."""
    environment = order.environment if order else Environment()
    variables = order.variables(identity) if order else {"CUDA_VISIBLE_DEVICES": ""}
    log_path = identity.worker_log(worker_id)
    boot = WorkerBoot(
        worker_id=worker_id,
        node_id=identity.node_id,
        host_id=identity.host_id,
        nodelet_url=identity.url,
        nodelet_unix=identity.unix,
        gcs_url=identity.gcs_url,
        token=identity.token,
        session_dir=str(identity.session_dir),
        arena_dir=str(identity.arena_dir),
        socket_path=str(identity.socket_path(worker_id)),
        log_path=str(log_path),
        job_id=order.lease.job_id if order else "",
        **({"runtime_env": order.spec.runtime_env} if order else {}),
    )
    return ForkRequest(
        worker_id=worker_id,
        log_path=str(log_path),
        env={**variables, **_names(identity, worker_id)},
        cwd=environment.cwd,
        sys_path=environment.sys_path,
        boot=msgspec.msgpack.encode(boot),
    )


def driver_request(identity: Identity, worker_id: str, order: Order) -> ForkRequest:
    """Return the start of a job's entrypoint, run by a shell in a process group of its own."""
    driver = order.spec.driver
    if driver is None:
        raise BadRequestError(f"{order.lease.lease_id} has no entrypoint", field="worker.driver")
    environment = order.environment
    parts = (*environment.sys_path, os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(part for part in parts if part)
    variables = {
        "PYTHONUNBUFFERED": "1",
        **order.variables(identity),
        "STOKER_ADDRESS": identity.gcs_url,
        "STOKER_JOB_ID": driver.job_id,
        "STOKER_TOKEN": identity.token,
        **_names(identity, worker_id),
        **driver.env,
    }
    if path:
        variables["PYTHONPATH"] = path
    # `python` in an entrypoint is the one that has stoker, even if the node's shell knows another.
    known = variables.get("PATH", os.environ.get("PATH", os.defpath))
    variables["PATH"] = f"{os.path.dirname(environment.python)}{os.pathsep}{known}"
    return ForkRequest(
        worker_id=worker_id,
        log_path=str(identity.driver_log(driver.job_id)),
        env=variables,
        cwd=environment.cwd,
        argv=("/bin/sh", "-c", driver.entrypoint),
    )
