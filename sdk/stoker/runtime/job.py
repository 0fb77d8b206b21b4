"""The job of a process, which the tasks and actors that it starts inherit.

A driver is one job from ``init()`` on. A worker has the job of its lease, and fetches that job's namespace
and environment from the gcs when they are needed first.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from stoker.runtime.net.http import HttpClient
from stoker.runtime.options.runtime_env import make_runtime_env
from stoker.runtime.options.strategies import strategy_of
from stoker.runtime.options.uploads import uploader
from stoker_wire.messages.common import ANY_NAMESPACE, RuntimeEnv, Strategy
from stoker_wire.messages.objects import CACHE_NAMESPACE
from stoker_wire.messages.work import Owner

if TYPE_CHECKING:
    from stoker.runtime.net.clients import ClusterClients
    from stoker.runtime.options.runtime_env import Fetched
    from stoker.runtime.process.identity import Identity
    from stoker.runtime.process.io_thread import IoThread
    from stoker_wire.messages.cluster import ActorSpec, Lease
    from stoker_wire.messages.work import Job

_JOB_S = 15.0


class JobContext:
    """The job of this process, and its lease if it is a worker."""

    def __init__(
        self, identity: Identity, io: IoThread, clients: ClusterClients, job_id: str = ""
    ) -> None:
        self._identity = identity
        self._io = io
        self._clients = clients
        self.job_id = job_id
        self.lease: Lease | None = None
        self.actor: ActorSpec | None = None
        """The actor that runs in this worker, if one does."""
        self._namespace = self._cache_namespace = ""
        self._job_env: RuntimeEnv | None = None
        self._lease_env: RuntimeEnv | None = None
        self._fetched: Fetched = {}
        self.held: tuple[float, float, str] = (0.0, 0.0, "")
        """The CPUs and GPUs that a task has here, and of which placement group; an actor's call has none."""
        self.captured_by = ""
        """The placement group in which what this worker starts runs too, or ''."""

    def join(self, job: Job) -> None:
        """Work for ``job`` from now on."""
        self.job_id, self._namespace, self._job_env = job.job_id, job.namespace, job.runtime_env
        shared = ANY_NAMESPACE in job.namespaces
        self._cache_namespace = CACHE_NAMESPACE if shared else f"{CACHE_NAMESPACE}/{job.user}"

    def take_lease(
        self, lease: Lease, env: RuntimeEnv | None, *, capture_child_tasks: bool
    ) -> None:
        """Work for the job of a lease; its ``env`` and group are what the worker's tasks inherit."""
        self.lease, self._lease_env = lease, env
        self.captured_by = lease.group_id if capture_child_tasks else ""
        has = {} if lease.actor_id else lease.resources
        self.held = (has.get("CPU", 0.0), has.get("GPU", 0.0), lease.group_id if has else "")
        if lease.job_id != self.job_id:
            self.job_id, self._namespace, self._job_env = lease.job_id, "", None

    def owner(self) -> Owner:
        """Return this process as the owner of the actors that it creates."""
        lease, actor = self.lease, self.actor
        if lease is None:
            return Owner(peer_id=self._identity.peer_id)
        return Owner(
            peer_id=self._identity.peer_id,
            node_id=lease.node_id,
            node_incarnation=lease.node_incarnation,
            actor_id=actor.actor_id if actor is not None else "",
            incarnation=actor.incarnation if actor is not None else 0,
        )

    @property
    def namespace(self) -> str:
        """The namespace of the job's named actors (not on the loop thread of a worker)."""
        self._env_of_job()
        return self._namespace

    @property
    def cache_namespace(self) -> str:
        """The namespace of results that jobs share: those of its user, or all (not on the loop thread)."""
        self._env_of_job()
        return self._cache_namespace

    def _env_of_job(self) -> RuntimeEnv:
        if self._job_env is None:
            actor_id = self.lease.actor_id if self.lease is not None else ""
            self.join(self._io.run(self._clients.job_of(self.job_id, actor_id), _JOB_S))
        assert self._job_env is not None
        return self._job_env

    def strategy_of(self, user: Any) -> Strategy:
        """Return the scheduling strategy of a task or actor that this process starts."""
        if user is None and self.captured_by:
            return Strategy(group_id=self.captured_by, capture_child_tasks=True)
        return strategy_of(user)

    def runtime_env_of(self, user: Any) -> RuntimeEnv:
        """Return the environment of a task or actor that this process starts.

        It inherits what its options do not name from the task or actor that starts it, in a driver from
        the job. Variables are merged by name, ``py_modules`` and ``kernels`` are added.
        """
        base = self._lease_env or self._env_of_job()
        if not user:
            return base
        given = self.uploaded_env(user)
        installs = bool(
            given.pip or given.uv or given.uv_project or given.conda or given.conda_file
        )
        if given.image_uri:  # what a node installs is not in images
            installs = True
            base = msgspec.structs.replace(base, setup="", kernels=())
        return RuntimeEnv(
            env_vars={**base.env_vars, **given.env_vars},
            working_dir=given.working_dir or base.working_dir,
            py_modules=(*base.py_modules, *given.py_modules),
            pip=given.pip or (() if installs else base.pip),
            uv=given.uv or (() if installs else base.uv),
            uv_project=given.uv_project or (None if installs else base.uv_project),
            conda=given.conda or ("" if installs else base.conda),
            conda_file=given.conda_file or ("" if installs else base.conda_file),
            image_uri=given.image_uri or ("" if installs else base.image_uri),
            setup=given.setup or base.setup,
            worker_process_setup=given.worker_process_setup or base.worker_process_setup,
            preload=given.preload or base.preload,
            sys_path=base.sys_path,
            cwd=None if given.working_dir else base.cwd,
            kernels=(*base.kernels, *(k for k in given.kernels if k not in base.kernels)),
        )

    @property
    def worker_process_setup(self) -> str:
        """Code that this worker runs before its first call, as in ``RuntimeEnv``; "" for nothing."""
        return self._lease_env.worker_process_setup if self._lease_env is not None else ""

    def uploaded_env(self, user: Any) -> RuntimeEnv:
        """Check a user's runtime_env and upload the folders that it names; return its message form."""
        if not user:
            return RuntimeEnv()
        return make_runtime_env(user, uploader(self.http), self._fetched)

    @functools.cached_property
    def http(self) -> HttpClient:
        """A synchronous client of the gcs, for user threads."""
        return HttpClient(self._identity.gcs_url, token=self._identity.credential)
