"""The launch of a process: a lease and its environment, turned into a request to the fork server.

The environment variables of workers and drivers are decided here and nowhere else.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from stoker_nodelet.core import LeaseTerms, WorkKind
from stoker_nodelet.devices.inventory import visible_mask
from stoker_nodelet.environments.environments import Environment
from stoker_nodelet.kernels.cache import TRITON_VARIABLE
from stoker_nodelet.workers.fork_client import ForkRequest
from stoker_wire.errors import BadRequestError
from stoker_wire.messages.cluster import Lease, WorkerSpec
from stoker_wire.messages.common import RuntimeEnv
from stoker_wire.messages.node_api import WorkerBoot
from stoker_wire.messages.work import DETACHED_JOB

if TYPE_CHECKING:
    from pathlib import Path

    from stoker_nodelet.identity import Identity

_BUILTINS = frozenset(
    """alias bg cd chdir command echo eval exec exit export false fc fg getopts hash help jobs kill let local
    printf pwd read return set shift source test time times trap true type ulimit umask unalias unset wait
    : . [ {""".split()  # noqa: SIM905
)
"""Commands of shells of which there can be programs too."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """A lease with everything that its worker needs to know."""

    lease: Lease
    spec: WorkerSpec
    environment: Environment
    output_dir: str = ""

    @property
    def name(self) -> str:
        """The label of the worker's output."""
        if self.spec.driver is not None:
            return "driver"
        return self.spec.actor.class_name if self.spec.actor else self.lease.name

    def token(self, identity: Identity) -> str:
        """Return the token of the job that the process works for, or of the detached actor that it is."""
        lease = self.lease
        actor_id = ""
        if lease.job_id == DETACHED_JOB:
            actor_id = lease.actor_id or self.spec.acts_for
        return identity.tokens.job(lease.job_id, actor_id)

    def variables(self, identity: Identity) -> dict[str, str]:
        """Return the environment variables: of token, devices, threads and cache, then the job's own."""
        cpus = self.lease.resources.get("CPU", 0.0)
        variables = {
            "STOKER_TOKEN": self.token(identity),
            "CUDA_VISIBLE_DEVICES": self._visible_gpus(identity),
        }
        if self.lease.gpus and not identity.fake_gpus:
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order that NVML counts in
        user = self.environment.user
        if user is not None:
            variables.update(user.variables)
        elif identity.triton_dir:  # the node's own, which another user must not write to
            variables[TRITON_VARIABLE] = identity.triton_dir
        if "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = str(max(1, int(cpus)))
        if self.output_dir:
            variables["STOKER_JOB_OUTPUT_DIR"] = self.output_dir
        return {**variables, **self.environment.env_vars}

    def _visible_gpus(self, identity: Identity) -> str:
        container, gpus = self.environment.container, self.lease.gpus
        if container is None or not container.devices or gpus.keys() <= identity.gpu_uuids.keys():
            return visible_mask(gpus, identity.gpu_uuids)
        # A container counts only the GPUs that it has.
        return ",".join(str(index) for index in range(len(gpus)))


def _id_variables(identity: Identity, worker_id: str, launch: LaunchSpec | None) -> dict[str, str]:
    variables = {"STOKER_NODE_ID": identity.node_id, "STOKER_WORKER_ID": worker_id}
    if launch is None or launch.environment.user is None:
        variables["STOKER_SESSION_DIR"] = str(identity.session_dir)
    return variables


def worker_fork(
    identity: Identity,
    worker_id: str,
    launch: LaunchSpec | None,
    *,
    token: str,
    mark_key: bytes,
) -> ForkRequest:
    """Return the fork of a worker; without a launch spec it is a fresh one, to be assigned later.

    ``token`` is the one by which the worker and this nodelet know each other.
    """
    environment = launch.environment if launch else Environment()
    variables = launch.variables(identity) if launch else {"CUDA_VISIBLE_DEVICES": ""}
    log_path = identity.worker_log(worker_id)
    user = environment.user
    boot = WorkerBoot(
        worker_id=worker_id,
        node_id=identity.node_id,
        host_id=identity.host_id,
        nodelet_url=identity.url,
        nodelet_unix=identity.unix,
        gcs_url=identity.gcs_url,
        token=token,
        session_dir=str(identity.session_dir) if user is None else "",
        arena_dir=str(identity.arena_dir) if user is None else "",
        socket_path=str(identity.socket_path(worker_id)),
        log_path=str(log_path),
        job_id=launch.lease.job_id if launch else "",
        mark_key=mark_key,
        run_as=user.name if user is not None else "",
        runtime_env=launch.spec.runtime_env if launch else RuntimeEnv(),
    )
    return ForkRequest(
        worker_id=worker_id,
        log_path=str(log_path),
        env={**variables, **_id_variables(identity, worker_id, launch)},
        cwd=environment.cwd,
        sys_path=environment.sys_path,
        boot=msgspec.msgpack.encode(boot),
        user=user,
        python=environment.python,
        preload=environment.preload,
        socket_path=boot.socket_path,
    )


def driver_fork(
    identity: Identity, worker_id: str, launch: LaunchSpec, *, token_file: Path
) -> ForkRequest:
    """Return the start of a job's entrypoint, run by a shell in a process group of its own.

    ``token_file`` is where it, and what it starts, finds its token.
    """
    driver = launch.spec.driver
    if driver is None:
        raise BadRequestError(f"{launch.lease.lease_id} has no entrypoint", field="worker.driver")
    environment = launch.environment
    is_here = environment.container is None
    parts = (*environment.sys_path, os.environ.get("PYTHONPATH", "") if is_here else "")
    path = os.pathsep.join(part for part in parts if part)
    variables = {
        "PYTHONUNBUFFERED": "1",
        **launch.variables(identity),
        "STOKER_ADDRESS": identity.gcs_url,
        "STOKER_JOB_ID": driver.job_id,
        "STOKER_JOB_ATTEMPT": str(driver.attempt),
        **_id_variables(identity, worker_id, launch),
        **driver.env,
    }
    if "STOKER_TOKEN" not in driver.env.keys() | environment.env_vars.keys():
        # A shell may run for days: what it starts late finds here what is good by then.
        variables["STOKER_TOKEN_FILE"] = str(token_file)
    if path:
        variables["PYTHONPATH"] = path
    # `python` in an entrypoint is the one that has stoker, even if the node's shell knows another.
    entrypoint = driver.entrypoint
    if is_here:
        path_before = variables.get("PATH", os.environ.get("PATH", os.defpath))
        variables["PATH"] = f"{os.path.dirname(environment.python)}{os.pathsep}{path_before}"
        entrypoint = shell_script(entrypoint, variables["PATH"])
    return ForkRequest(
        worker_id=worker_id,
        log_path=str(identity.driver_log(driver.job_id, driver.attempt)),
        env=variables,
        cwd=environment.cwd,
        argv=("/bin/sh", "-c", entrypoint),
        user=environment.user,
    )


def shell_script(entrypoint: str, path: str) -> str:
    """Return what a shell is to run: a single command in the shell's place, so that its exit code counts.

    Any other shell dies of SIGTERM at once, while what it runs may end in order; so do builtins, which are
    not what programs of the same name are.
    """
    lexer = shlex.shlex(re.sub("[<>][&|]", ">", entrypoint), posix=True, punctuation_chars="();&|")
    lexer.whitespace = " \t"
    lexer.commenters = ""
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quotation without its end: the shell says where
        return entrypoint
    is_single = "\n" not in entrypoint and not any(set(word) <= set("();&|") for word in words)
    if not words or not is_single or words[0] in _BUILTINS or not shutil.which(words[0], path=path):
        return entrypoint
    return f"exec {entrypoint}"


def terms_of(lease: Lease) -> LeaseTerms:
    """Return what the lease machine knows of a lease."""
    return LeaseTerms(
        lease_id=lease.lease_id,
        job_id=lease.job_id,
        kind=WorkKind(lease.kind),
        node_incarnation=lease.node_incarnation,
        gpus=lease.gpus,
        actor_id=lease.actor_id,
    )
