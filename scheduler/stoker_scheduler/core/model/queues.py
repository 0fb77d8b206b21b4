"""The queues that an operator makes: a tree of tenants' parts of the cluster, and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

DEFAULT_QUEUE = "default"
"""The queue of jobs that name none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """A queue of jobs, or of other queues; all resources in units.

    ``quota`` is what it can count on: others may borrow what it does not use, and give it back on
    demand. ``limit`` is the most that it may have with what it borrows, ``user_limit`` and
    ``job_limit`` the most of it for one user and one job; a resource that they do not name has no limit.
    ``rate_limit`` is how many leases a second may start for one user (0: no limit). What quotas leave
    of the cluster is divided by ``weight`` among the queues that are active. Nothing starts from a queue
    that is ``stopped``. ``policy`` names the order of its requests; '' is the default.
    """

    name: str
    parent: str = ""
    weight: float = 1.0
    quota: Mapping[str, int] = field(default_factory=dict)
    limit: Mapping[str, int] = field(default_factory=dict)
    user_limit: Mapping[str, int] = field(default_factory=dict)
    job_limit: Mapping[str, int] = field(default_factory=dict)
    rate_limit: float = 0.0
    stopped: bool = False
    policy: str = ""


class Account(NamedTuple):
    """Whom a lease is charged to: an owner's work for one job (all that the gcs starts for a job is one).

    ``queue`` is that of the job, ``user`` whose job it is.
    """

    owner: str
    job_id: str
    user: str = ""
    queue: str = DEFAULT_QUEUE
