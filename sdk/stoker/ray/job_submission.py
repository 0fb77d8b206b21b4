"""``ray.job_submission``: ``JobSubmissionClient`` with Ray's keywords and records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from stoker.jobs import JobSubmissionClient as StokerClient
from stoker.ray.mapping.init import stoker_address
from stoker.ray.mapping.lacking import attribute_error
from stoker.ray.runtime_env import mapped_env

if TYPE_CHECKING:
    from stoker.jobs import Job

__all__ = ("JobDetails", "JobInfo", "JobStatus", "JobSubmissionClient", "JobType")


_PREFIX = "job_"


class JobStatus(StrEnum):
    """The states of a job."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    def is_terminal(self) -> bool:
        """Return whether nothing follows this state."""
        return self in (JobStatus.STOPPED, JobStatus.SUCCEEDED, JobStatus.FAILED)


class JobType(StrEnum):
    """Submitted jobs have an entrypoint, others are drivers that attached."""

    SUBMISSION = "SUBMISSION"
    DRIVER = "DRIVER"


@dataclass(frozen=True, slots=True)
class JobDetails:
    """A job; times are in milliseconds."""

    type: JobType
    status: JobStatus
    entrypoint: str
    job_id: str
    submission_id: str | None
    message: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    start_time: int | None = None
    end_time: int | None = None
    driver_exit_code: int | None = None
    driver_node_id: str | None = None


JobInfo = JobDetails


def _details(job: Job) -> JobDetails:
    entrypoint = job.entrypoint or ""
    return JobDetails(
        type=JobType.SUBMISSION if entrypoint else JobType.DRIVER,
        status=JobStatus(str(job.state)),
        entrypoint=entrypoint,
        job_id=job.job_id,
        submission_id=job.job_id if entrypoint else None,
        message=job.message,
        metadata=dict(job.metadata),
        start_time=_ms(job.started_at_s),
        end_time=_ms(job.ended_at_s),
        driver_exit_code=job.exit_code,
    )


def _id_of(given: str) -> str:
    """Return the id of a job by one of the user's own: Stoker's begin with ``job_``."""
    return given if given.startswith(_PREFIX) else f"{_PREFIX}{given}"


def _ms(at_s: float | None) -> int | None:
    return int(at_s * 1000) if at_s else None


class JobSubmissionClient:
    """A client that submits jobs; ``token`` comes from STOKER_TOKEN, or the ``headers``."""

    def __init__(
        self,
        address: str | None = None,
        create_cluster_if_needed: bool = False,
        cookies: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        verify: Any = True,
        token: str | None = None,
    ) -> None:
        given = (headers or {}).get("Authorization", "").removeprefix("Bearer ") or None
        self.client = StokerClient(stoker_address(address), token or given)

    def submit_job(
        self,
        *,
        entrypoint: str,
        job_id: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        metadata: Mapping[str, str] | None = None,
        submission_id: str | None = None,
        entrypoint_num_cpus: float | None = None,
        entrypoint_num_gpus: float | None = None,
        entrypoint_memory: int | None = None,
        entrypoint_resources: Mapping[str, float] | None = None,
        entrypoint_label_selector: Mapping[str, str] | None = None,
        **options: Any,
    ) -> str:
        """Run a shell command as a driver on the cluster; return the job's id, if need be a new one."""
        given = submission_id or job_id
        made = self.client.submit_job(
            entrypoint=entrypoint,
            job_id=_id_of(given) if given else None,
            runtime_env=mapped_env(runtime_env),
            metadata=metadata,
            entrypoint_num_cpus=entrypoint_num_cpus or 0.0,
            entrypoint_num_gpus=entrypoint_num_gpus or 0.0,
            entrypoint_memory=entrypoint_memory or 0,
            entrypoint_resources=entrypoint_resources,
            label_selector=entrypoint_label_selector,
            **options,
        )
        return given or made

    def get_job_status(self, job_id: str) -> JobStatus:
        """Return the job's state."""
        return JobStatus(str(self.client.get_job_status(_id_of(job_id))))

    def get_job_info(self, job_id: str) -> JobDetails:
        """Return what is known of a job."""
        return _details(self.client.get_job(_id_of(job_id)))

    def get_job_logs(self, job_id: str) -> str:
        """Return what the job has printed."""
        return self.client.get_job_logs(_id_of(job_id))

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """Yield what the job prints, until it ends."""
        lines = self.client.tail_job_logs(_id_of(job_id))
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            yield line.text + "\n"

    def list_jobs(self) -> list[JobDetails]:
        """Return all jobs."""
        return [_details(job) for job in self.client.list_jobs()]

    def stop_job(self, job_id: str) -> bool:
        """Stop a job; return whether it was running."""
        before = self.client.get_job_status(_id_of(job_id))
        self.client.stop_job(_id_of(job_id))
        return not before.terminal

    def delete_job(self, job_id: str) -> bool:
        """Forget a job that has ended."""
        self.client.delete_job(_id_of(job_id))
        return True

    def get_address(self) -> str:
        """Return the cluster's address."""
        return self.client.address

    def get_version(self) -> str:
        """Return the version of Stoker."""
        from stoker_wire.version import VERSION

        return VERSION


def __getattr__(name: str) -> Any:
    raise attribute_error(__name__, name)
