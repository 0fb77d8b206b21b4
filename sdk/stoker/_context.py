"""Which task this thread or coroutine runs, and what user code may know of where it runs."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """The task that runs now."""

    task_id: str
    name: str
    attempt: int
    actor_id: str = ""


current_task: ContextVar[TaskInfo | None] = ContextVar("stoker_task", default=None)


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """Where the calling code runs. Ids are '' where they do not apply (no task in a driver)."""

    job_id: str
    node_id: str
    worker_id: str
    task_id: str
    task_name: str
    attempt: int
    actor_id: str
    namespace: str
    gcs_url: str
    gpu_ids: tuple[int, ...] = ()
    assigned_resources: dict[str, float] = field(default_factory=dict)
    was_current_actor_reconstructed: bool = False

    def get_job_id(self) -> str:
        """Return the job's id."""
        return self.job_id

    def get_node_id(self) -> str:
        """Return the node's id."""
        return self.node_id

    def get_task_id(self) -> str | None:
        """Return the running task's id, or None."""
        return self.task_id or None

    def get_actor_id(self) -> str | None:
        """Return the actor's id, or None outside actors."""
        return self.actor_id or None

    def get_worker_id(self) -> str:
        """Return this process's id."""
        return self.worker_id

    def get_accelerator_ids(self) -> dict[str, list[str]]:
        """Return the devices of this lease: ``{"GPU": ["0", ...]}``."""
        return {"GPU": [str(i) for i in self.gpu_ids]}

    def get_assigned_resources(self) -> dict[str, float]:
        """Return the resources of this worker's lease."""
        return dict(self.assigned_resources)
