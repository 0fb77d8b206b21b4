"""A training as a job of the cluster: begun, followed and asked things, from the user's program.

Base of ``ElasticTrainer`` and ``ShardedTrainer``, which say what their jobs run. It does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from stoker.exceptions import (
    GetTimeoutError,
    NameTakenError,
    NotFoundError,
    SerializationError,
    StokerError,
)
from stoker.jobs import JobSubmissionClient
from stoker.runtime import current
from stoker.runtime.process.stderr import write_now
from stoker_train.elastic.options import check_seconds
from stoker_wire.ids import Prefix, new_id

if TYPE_CHECKING:
    from stoker.jobs import Job
    from stoker_train.job_records import JobRecords

__all__ = ("TrainingJob", "Wait", "pickled")

R = TypeVar("R")
_POLL_S = 1.0
_END_S = 60.0
_TELL_S = 8.0
"""Who waits for what it needs is told of that after so long."""


class TrainingJob(ABC, Generic[R]):
    """A training on the cluster, with a result of type ``R``.

    The job is the cluster's: the program that has begun it may end, and ``attach(name)`` finds it again.
    """

    _controller: str
    """The module that is the job's driver."""
    _kind: str
    """The kind of job, for its metadata."""

    name: str
    queue: str
    job_id: str
    _members: str
    """The name that its workers have."""
    _namespace: str | None = None
    _retries: int
    _runtime_env: dict[str, Any]

    def fit(self, timeout_s: float | None = None) -> R:
        """Train to the end, and return what became of it; an error of the loop is in ``Result.error``.

        GetTimeoutError after ``timeout_s``: the job goes on then.
        """
        self.submit()
        return self.result(timeout_s)

    def submit(self) -> str:
        """Begin the training, and return the id of its job. NameTakenError if one of that name runs."""
        client = _client()
        if any(one.name == self.name and not one.state.terminal for one in client.list_jobs()):
            raise NameTakenError(
                f"name: {self.name!r} is a job that runs\n"
                f"give another name, or follow it by {type(self).__name__}.attach(name)",
                field="name",
            )
        spec, metadata = self._specify()
        self.job_id = new_id(Prefix.JOB)
        self._records.put_spec(spec)
        runtime = current.runtime()
        try:
            client.submit_job(
                entrypoint=f"{sys.executable} -m {self._controller}",
                job_id=self.job_id,
                name=self.name,
                queue=self.queue,
                retries=self._retries,
                retry_delay_s=0.1,
                namespace=runtime.job.namespace,
                runtime_env=_with_search_path(self._runtime_env),
                metadata={self._kind: "trainer", **metadata},
            )
        except StokerError as error:
            if not error.retryable:  # else it may have been submitted
                with contextlib.suppress(StokerError):
                    self._records.drop_spec()
            raise
        return self.job_id

    @classmethod
    def attach(cls, name: str) -> Self:
        """Return the trainer of a job that was submitted, by its name or id. NotFoundError for none."""
        client = _client()
        if name.startswith(f"{Prefix.JOB}_"):
            job = client.get_job(name)
        else:
            jobs = [one for one in client.list_jobs() if one.name == name]
            if not jobs:
                raise NotFoundError(
                    f"name: no job is named {name!r}\n`stoker list jobs` shows all", field="name"
                )
            job = max(jobs, key=lambda one: one.created_at_s)
        if job.metadata.get(cls._kind) != "trainer":
            raise NotFoundError(
                f"name: {name!r} is no job of {cls.__name__}\n`stoker list jobs` shows all",
                field="name",
            )
        trainer = cls.__new__(cls)
        trainer.name, trainer.job_id = job.name or name, job.job_id
        trainer._namespace = job.namespace
        return trainer

    def result(self, timeout_s: float | None = None) -> R:
        """Wait for the end of the training and return its result; GetTimeoutError after ``timeout_s``.

        With 0 it only looks.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, or_zero=True)
        client, records = _client(), self._records
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        wait = Wait(self.name, self.job_id, self._members)
        while True:
            left_s = _POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
            result = self._kept_result(records, min(_POLL_S, left_s))
            if result is not None:
                self._await_end(client, failed=self._has_failed(result))
                return result
            job = client.get_job(self.job_id)
            if job.state.terminal:
                # Of a result that was written just before the end.
                kept = self._kept_result(records, 0.0)
                return kept if kept is not None else self._without_result(job)
            progress = self.progress()
            wait.look(self._waits(job, progress), lambda: self._reason(client, progress))  # noqa: B023
            if deadline is not None and time.monotonic() >= deadline:
                raise GetTimeoutError(
                    f"training {self.name!r} is not over after {timeout_s:g} s\n"
                    f"it is {self.progress().get('phase', 'starting')}; `stoker explain {self.job_id}` "
                    "says what it waits for"
                )

    def progress(self) -> dict[str, Any]:
        """Return how it is: phase, metrics, steps and more; empty before it has begun."""
        found: dict[str, Any] = self._records.progress()
        return found

    def save(self) -> None:
        """Ask for a durable checkpoint."""
        self._ask("checkpoint")

    def stop(self) -> None:
        """Ask that it ends well, at the next batch boundary."""
        self._ask("stop")

    @abstractmethod
    def _specify(self) -> tuple[Any, dict[str, str]]:
        """Return what the job runs, and what its metadata says beside."""

    @abstractmethod
    def _records_of(self, job_id: str, namespace: str | None) -> JobRecords:
        """Return the job's records."""

    @abstractmethod
    def _kept_result(self, records: Any, timeout_s: float) -> R | None:
        """Return the result in the records, None if there is none for so long."""

    @abstractmethod
    def _has_failed(self, result: R) -> bool:
        """Return whether a result has an error."""

    @abstractmethod
    def _without_result(self, job: Job) -> R:
        """Return the result of a job that ended without one."""

    @abstractmethod
    def _waits(self, job: Job, progress: Mapping[str, Any]) -> bool:
        """Return whether the job has not what it needs to train."""

    @abstractmethod
    def _reason(self, client: JobSubmissionClient, progress: Mapping[str, Any]) -> str:
        """Return why it waits and what could be done; empty if that is not known now."""

    @property
    def _records(self) -> Any:
        if not self.job_id:
            raise NotFoundError("the training has not begun\ncall fit() or submit() before")
        return self._records_of(self.job_id, self._namespace)

    def _ask(self, what: str, value: Any = None) -> None:
        self._records.ask(what, value=value)

    def _await_end(self, client: JobSubmissionClient, *, failed: bool) -> None:
        """Wait until nothing of the job runs; one that has failed is not tried again."""
        try:
            if failed:
                client.stop_job(self.job_id)
            client.wait(self.job_id, timeout_s=_END_S)
            self._records.drop_spec()
        except StokerError:
            return  # its result is there; the cluster ends the rest


@dataclass(slots=True)
class Wait:
    """A wait of a job for what it needs, as its ``members``, of which the user is told once."""

    name: str
    job_id: str
    members: str
    since_s: float | None = None
    told: bool = False

    def look(self, waits: bool, reason: Callable[[], str]) -> None:
        """Take note of whether the job waits; says on stderr why it has done so for a while."""
        now_s = time.monotonic()
        if not waits:
            self.since_s, self.told = None, False
            return
        if self.since_s is None:
            self.since_s = now_s
        waited_s = now_s - self.since_s
        if self.told or waited_s < _TELL_S:
            return
        self.told = True
        try:
            why = reason()
        except StokerError:
            return  # whoever follows the job hears of it
        if why:
            write_now(
                f"stoker: training {self.name!r} has waited {waited_s:.0f} s for its {self.members}: "
                f"{why}. More: stoker explain {self.job_id}\n"
            )


def pickled(field: str, value: Any) -> bytes:
    """Return the pickle of an option; SerializationError, with its field, where there is none."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise SerializationError(
            f"{field} cannot be pickled\n"
            f"make what it holds inside of the loop ({type(error).__name__}: {error})",
            field=field,
        ) from None


def _with_search_path(runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Return the environment with this program's search path: its modules are found where it finds them."""
    own = os.path.realpath(os.path.join(sys.base_prefix, "lib"))
    paths = [os.path.abspath(one) for one in sys.path]
    paths = [one for one in paths if not os.path.realpath(one).startswith(own)]
    variables = dict(runtime_env.get("env_vars", {}))
    known = variables.get("PYTHONPATH", "")
    variables["PYTHONPATH"] = os.pathsep.join([*([known] if known else []), *paths])
    return {**runtime_env, "env_vars": variables}


def _client() -> JobSubmissionClient:
    runtime = current.runtime()
    return JobSubmissionClient(runtime.identity.gcs_url, token=runtime.identity.credential.token)
