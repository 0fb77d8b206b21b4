"""Bodies and replies of Ray's job API (Ray 2.60), whose names are Ray's."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from stoker_wire.messages.common import Amount, Asked, Message, Metadata, Name, Record, Selector
from stoker_wire.messages.work import Entrypoint, JobState

API_VERSION = "4"
RAY_VERSION = "2.60.0"
"""The version whose job API is answered; clients refuse a server that is too old for an option."""


class RayVersion(Record):
    """The versions that a client looks at before it submits."""

    version: str = API_VERSION
    ray_version: str = RAY_VERSION
    ray_commit: str = ""
    session_name: str = ""


class RaySubmit(Message):
    """Request to run ``entrypoint`` as a job; ``job_id`` is an older name of ``submission_id``."""

    entrypoint: Entrypoint
    submission_id: Name | None = None
    job_id: Name | None = None
    runtime_env: dict[str, Any] | None = None
    metadata: Metadata | None = None
    entrypoint_num_cpus: Amount | None = None
    entrypoint_num_gpus: Amount | None = None
    entrypoint_memory: Amount | None = None
    entrypoint_resources: Asked | None = None
    entrypoint_label_selector: Selector | None = None


class RaySubmitted(Record):
    """The id of a submitted job, by both of its names."""

    job_id: str
    submission_id: str


class RayJobType(StrEnum):
    """Submitted jobs have an entrypoint, others are drivers that attached."""

    SUBMISSION = "SUBMISSION"
    DRIVER = "DRIVER"


class RayJob(Record):
    """A job as Ray shows it; times are in milliseconds."""

    type: RayJobType
    job_id: str
    submission_id: str | None
    status: JobState
    entrypoint: str
    message: str = ""
    metadata: dict[str, str] = {}
    runtime_env: dict[str, Any] = {}
    start_time: int | None = None
    end_time: int | None = None
    driver_node_id: str | None = None
    driver_exit_code: int | None = None


class RayLogs(Record):
    """The output of a job so far."""

    logs: str


class RayStopped(Record):
    """Whether a job was there to be stopped."""

    stopped: bool


class RayDeleted(Record):
    """Whether a job was deleted."""

    deleted: bool
