"""The runtime context: the job, node, worker, task and actor in which user code runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker.exceptions import BadRequestError
from stoker.runtime import current

if TYPE_CHECKING:
    from stoker.runtime.actors.handle import ActorHandle
    from stoker.runtime.worker.execute import CallExecutor
    from stoker_wire.messages.work import Actor


@dataclass(frozen=True, slots=True)
class RuntimeContext:
    """The place in which the calling code runs. Ids are '' where they do not apply (no task in a driver)."""

    job_id: str
    node_id: str
    worker_id: str
    task_id: str
    task_name: str
    attempt: int
    actor_id: str
    gcs_url: str
    gpu_ids: tuple[int, ...] = ()
    assigned_resources: dict[str, float] = field(default_factory=dict)
    was_current_actor_reconstructed: bool = False
    traceparent: str = ""
    """The W3C trace context of the calling code, as the header of this name has it; '' for none."""
    tracestate: str = ""

    @property
    def namespace(self) -> str:
        """The namespace of the job's named actors; a worker asks the gcs the first time."""
        return current.runtime().job.namespace

    @property
    def actor_name(self) -> str:
        """The actor's name, or '' outside of actors and in one without a name."""
        actor = _actor()
        return actor.name if actor is not None else ""

    @property
    def current_actor(self) -> ActorHandle[Any]:
        """A handle to the actor whose code this is; ``BadRequestError`` outside of actors."""
        from stoker.runtime.actors.create import handle_of

        actor = _actor()
        if actor is None:
            raise BadRequestError("current_actor: this code runs in no actor")
        return handle_of(actor)

    @property
    def node_labels(self) -> dict[str, str]:
        """The labels of this node."""
        from stoker_wire.messages.cluster import Node

        if not self.node_id:
            return {}
        node = current.runtime().job.http.call("GET", f"/v1/nodes/{self.node_id}", reply=Node)
        return dict(node.labels)

    def is_cancelled(self) -> bool:
        """Return whether the task was told to stop by now, by ``cancel()`` or its ``timeout``.

        Code in a thread is not interrupted: it must ask here, and end.
        """
        executor = _executor()
        received = executor.calls.running.get(self.task_id) if executor is not None else None
        return received is not None and received.stop_error is not None

    is_canceled = is_cancelled

    def get_task_name(self) -> str | None:
        """Return the running task's name, or None."""
        return self.task_name or None

    def get_task_function_name(self) -> str | None:
        """Return the qualified name of the function or method that runs, or None."""
        executor = _executor()
        received = executor.calls.running.get(self.task_id) if executor is not None else None
        if executor is None or received is None:
            return None
        name = received.template.function
        if executor.actor is not None:
            cls = type(executor.actor.instance)
            return f"{cls.__module__}.{cls.__qualname__}.{name}"
        function = executor.invoker.functions.get(name)
        if function is None:
            return received.template.name
        return f"{function.__module__}.{function.__qualname__}"

    def get_actor_name(self) -> str | None:
        """Return the actor's name, or None if it has none."""
        return self.actor_name or None

    def get_node_labels(self) -> dict[str, str]:
        """Return the labels of this node."""
        return self.node_labels

    def get_namespace(self) -> str:
        """Return the namespace of the job's named actors."""
        return self.namespace

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


def _executor() -> CallExecutor | None:
    runtime = current.maybe_runtime()
    return runtime.worker if runtime is not None else None


def _actor() -> Actor | None:
    """Return the gcs's record of the actor whose code calls this."""
    executor = _executor()
    return executor.actor.record if executor is not None and executor.actor is not None else None
