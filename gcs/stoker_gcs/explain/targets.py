"""The running processes that an id stands for, for whoever wants to look into them.

Only its owner and admins look into a program: not all who see its records, as what runs in it may be
secret. What does not run is refused with what it does instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from stoker_gcs.registry.actors.rules import ACTORS
from stoker_gcs.registry.jobs.rules import JOBS
from stoker_wire import ids
from stoker_wire.errors import BadRequestError, ConflictError, NotFoundError
from stoker_wire.messages.control import IdQuery
from stoker_wire.messages.work import DETACHED_JOB, ActorState, TaskState

if TYPE_CHECKING:
    from stoker_gcs.explain.id_prefixes import IdFinder
    from stoker_gcs.peer_clients import PeerClients
    from stoker_gcs.registry.access import Access
    from stoker_gcs.registry.task_history import TaskHistory
    from stoker_gcs.state.records import StateStore
    from stoker_wire.http.principals import Principal
    from stoker_wire.messages.cluster import Worker
    from stoker_wire.messages.work import Job

_SHOWN = 10


class TargetProcess(NamedTuple):
    """A process, by its worker id: drivers of submitted jobs have one, too."""

    node_id: str
    worker_id: str
    job_id: str


class Processes(NamedTuple):
    """The processes of a target, that of a driver first."""

    target: str
    processes: tuple[TargetProcess, ...]
    task_id: str = ""
    """The task that is meant: it may have ended when the process is looked at."""
    note: str = ""


class TargetFinder:
    """The search for the processes of a task, an actor, a worker, a job or a node."""

    def __init__(
        self,
        state: StateStore,
        peers: PeerClients,
        access: Access,
        history: TaskHistory,
        id_finder: IdFinder,
    ) -> None:
        self._state = state
        self._peers = peers
        self._access = access
        self._history = history
        self._id_finder = id_finder

    async def find(self, principal: Principal, target: str) -> Processes:
        """Return the processes of a target; ForbiddenError if they are not the principal's to look into."""
        id_ = await self._whole_id(principal, target)
        match id_.partition("_")[0]:
            case ids.Prefix.TASK:
                return await self._task(principal, id_)
            case ids.Prefix.ACTOR:
                return await self._actor(principal, id_)
            case ids.Prefix.WORKER:
                return await self._worker(principal, id_)
            case ids.Prefix.JOB:
                return await self._job(principal, id_)
            case ids.Prefix.NODE:
                return await self._node(principal, id_)
        raise BadRequestError(
            f"target: {id_[:60]!r} has no process\n"
            "give the id of a task (t_), an actor (a_), a worker (w_), a job (job_) or a node (n_)",
            field="target",
        )

    async def one(self, principal: Principal, target: str) -> tuple[Processes, TargetProcess]:
        """Return the one process of a target; of a job that of its driver."""
        found = await self.find(principal, target)
        if found.target.startswith(f"{ids.Prefix.NODE}_"):
            raise BadRequestError(
                f"target: node {found.target} has many processes\n"
                f"give a worker: stoker list workers --filter node={found.target}",
                field="target",
            )
        if found.note or not found.processes:
            raise ConflictError(
                f"{found.target} has no process that can be profiled\n"
                f"{found.note or f'see: stoker explain {found.target}'}"
            )
        return found, found.processes[0]

    async def _whole_id(self, principal: Principal, target: str) -> str:
        """Return the id that begins so; a beginning of none is returned as it is."""
        query = IdQuery(prefix=target, limit=_SHOWN)
        found = await self._id_finder.find(query)
        if any(match.id == target for match in found.matches):
            return target
        matches = [one.id for one in (await self._access.visible_ids(principal, found)).matches]
        matches += await self._own_workers(principal, target, set(matches))
        if len(matches) > 1:
            raise BadRequestError(
                f"target: several ids begin with {target}\n{', '.join(matches)}", field="target"
            )
        return matches[0] if matches else target

    async def _own_workers(self, principal: Principal, prefix: str, known: set[str]) -> list[str]:
        """Return the workers that begin so, that the principal may look into, and that are not known."""
        if not prefix.startswith(f"{ids.Prefix.WORKER}_"):
            return []
        return [
            worker.worker_id
            for worker in await self._peers.workers()
            if worker.worker_id.startswith(prefix)
            and worker.worker_id not in known
            and await self._may_look(principal, worker)
        ]

    async def _task(self, principal: Principal, task_id: str) -> Processes:
        record = (await self._history.attempts(task_id))[-1]
        await self._access.check_runs(principal, record.job_id, f"task {task_id}")
        if record.state.terminal:
            raise ConflictError(
                f"task {task_id} is {record.state} and runs no more\nsee: stoker explain {task_id}"
            )
        if record.state is not TaskState.RUNNING or not record.worker_id:
            raise ConflictError(
                f"task {task_id} is {record.state} and does not run yet\nsee: stoker explain {task_id}"
            )
        process = TargetProcess(record.node_id, record.worker_id, record.job_id)
        listed = await self._as_listed(principal, process, f"task {task_id}")
        return Processes(task_id, (listed,), task_id)

    async def _as_listed(
        self, principal: Principal, process: TargetProcess, what: str
    ) -> TargetProcess:
        """Return a process with the job for which its nodelet says that it works.

        ForbiddenError if that is not the principal's: the records of tasks are what programs have reported.
        """
        for worker in await self._peers.workers():
            if worker.worker_id == process.worker_id:
                await self._access.check_runs(
                    principal, await self._origin(worker), f"the process of {what}"
                )
                return _process(worker)
        return process

    async def _actor(self, principal: Principal, actor_id: str) -> Processes:
        actor = await self._state.get(ACTORS, actor_id)
        owner = actor.origin_job_id or actor.job_id
        await self._access.check_runs(principal, owner, f"actor {actor_id}")
        if not actor.worker_id or actor.state is ActorState.DEAD:
            raise ConflictError(
                f"actor {actor_id} is {actor.state} and has no process\n"
                f"see: stoker explain {actor_id}"
            )
        process = TargetProcess(actor.node_id, actor.worker_id, actor.job_id)
        listed = await self._as_listed(principal, process, f"actor {actor_id}")
        return Processes(actor_id, (listed,))

    async def _worker(self, principal: Principal, worker_id: str) -> Processes:
        for worker in await self._peers.workers():
            if worker.worker_id == worker_id:
                job_id = await self._origin(worker)
                await self._access.check_runs(principal, job_id, f"worker {worker_id}")
                return Processes(worker_id, (_process(worker),))
        raise NotFoundError(
            f"there is no worker {worker_id[:60]!r} that runs\nsee: stoker list workers"
        )

    async def _origin(self, worker: Worker) -> str:
        """Return the job to which a process belongs; that of a detached actor is the one that made it."""
        if worker.job_id != DETACHED_JOB or not worker.actor_id:
            return worker.job_id
        actor = await self._state.find(ACTORS, worker.actor_id)
        return actor.record.origin_job_id if actor is not None else worker.job_id

    async def _job(self, principal: Principal, job_id: str) -> Processes:
        job = await self._state.get(JOBS, job_id)
        await self._access.check_runs(principal, job_id, f"job {job_id}")
        if job.state.terminal:
            raise ConflictError(
                f"job {job_id} is {job.state} and runs no more\nsee: stoker explain {job_id}"
            )
        workers = [one for one in await self._peers.workers() if one.job_id == job_id]
        workers.sort(key=lambda one: (one.worker_id != job.worker_id, one.started_at_s))
        note = _about_driver(job, {one.worker_id for one in workers})
        if not workers and job.submitted:
            raise ConflictError(
                f"job {job_id} is {job.state} and has no process\nsee: stoker explain {job_id}"
            )
        return Processes(job_id, tuple(map(_process, workers)), note=note)

    async def _node(self, principal: Principal, node_id: str) -> Processes:
        self._peers.nodelet(node_id)  # or it says that there is none, or that it is dead
        workers = [one for one in await self._peers.workers() if one.node_id == node_id]
        mine = [one for one in workers if await self._may_look(principal, one)]
        return Processes(node_id, tuple(map(_process, mine)))

    async def _may_look(self, principal: Principal, worker: Worker) -> bool:
        return await self._access.runs_for(principal, await self._origin(worker))


def _process(worker: Worker) -> TargetProcess:
    return TargetProcess(worker.node_id, worker.worker_id, worker.job_id)


def _about_driver(job: Job, running: set[str]) -> str:
    """Return why a driver is not among the processes of its job, and what to do about it."""
    if job.submitted:
        return "" if job.worker_id in running else "its driver does not run now"
    where = f" on {job.hostname}" if job.hostname else ""
    return f"its driver was started by hand{where}: py-spy dump --pid {job.pid} there"
