"""Queues: the parts of a cluster that its tenants share, made by an operator and owned by the gcs.

Queues form a tree. What the quotas of active queues leave of the cluster is divided by their weights.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from stoker_wire.messages.common import (
    MAX_NAMES,
    Message,
    NodeFilterText,
    Part,
    Record,
    Resources,
    stated,
)

DEFAULT_QUEUE = "default"
"""The queue of jobs that name none; it is always there."""

QueueName = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", min_length=1, max_length=100)
]
Amounts = Annotated[
    dict[Annotated[str, stated(minLength=1)], Part],
    msgspec.Meta(max_length=MAX_NAMES, description="name -> amount; memory in bytes"),
]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class CreateQueue(Message):
    """Request for a queue, below ``parent`` or below the cluster itself.

    ``quota`` is what its work can count on: others borrow what it does not use, and give it back on
    demand. ``limit`` is the most that it may have, with what it borrows; ``user_limit`` and ``job_limit``
    are the most of it for one user and for one job. ``rate_limit`` is how many leases a second may start for
    one user (0: any number). Nothing starts from a queue that is ``stopped``. ``policy`` is the order of its
    requests: priority (the default, ''), fifo, fair, smallest, or one that is installed. ``node_filter`` is a
    condition on the nodes for its work and that of the queues below it. ``force`` admits quotas that the
    cluster, as it is now, does not have.
    """

    name: QueueName
    parent: str = ""
    weight: Weight = 1.0
    quota: Amounts = {}
    limit: Amounts = {}
    user_limit: Amounts = {}
    job_limit: Amounts = {}
    rate_limit: Rate = 0.0
    stopped: bool = False
    policy: str = ""
    node_filter: NodeFilterText = ""
    force: bool = False


class ChangeQueue(Message):
    """Request to change a queue; what is null stays. Fields as in :class:`CreateQueue`."""

    parent: str | None = None
    weight: Weight | None = None
    quota: Amounts | None = None
    limit: Amounts | None = None
    user_limit: Amounts | None = None
    job_limit: Amounts | None = None
    rate_limit: Rate | None = None
    stopped: bool | None = None
    policy: str | None = None
    node_filter: NodeFilterText | None = None
    force: bool = False


class SetQueues(Message):
    """Request that there be these queues, each named once, and no others but the default one: all or none."""

    queues: Annotated[tuple[CreateQueue, ...], msgspec.Meta(max_length=1000)]
    force: bool = False


class SetQueuesReply(Record):
    """The names of the queues that a :class:`SetQueues` created, changed and removed."""

    created: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class Queue(Record):
    """A queue as the gcs knows it; fields as in :class:`CreateQueue`."""

    name: str
    parent: str = ""
    weight: float = 1.0
    quota: Resources = {}
    limit: Resources = {}
    user_limit: Resources = {}
    job_limit: Resources = {}
    rate_limit: float = 0.0
    stopped: bool = False
    policy: str = ""
    node_filter: str = ""
    created_at_s: float = 0.0


class QueueUsage(Record):
    """Usage of a queue: what its work, with that of the queues below it, has and waits for now.

    ``share`` is the largest fraction of any resource of the cluster that it has, ``entitled`` the
    fraction that it can claim while the queues that are active now are; 0 if it is not one of them.
    """

    name: str
    used: Resources = {}
    share: float = 0.0
    entitled: float = 0.0
    leases: int = 0
    waiting: int = 0
    """Leases that are waited for, of this queue itself."""
    held: str = ""
    """The limit that keeps some of those from starting."""


class QueueWaiter(Record):
    """A request that waits in a queue; ``position`` is among those of this queue, in its order."""

    position: int
    request_id: str
    job_id: str
    name: str
    user: str
    resources: Resources
    count: int
    priority: int
    waited_s: float
    held: str = ""
    """The limit that keeps it from starting."""


class QueueExplanation(Record):
    """Standing of a queue: what it has, lends and borrows, who waits in it, and what binds it.

    ``borrowed`` is what it has beyond its quota, ``lent`` what of its quota others use now. ``waiting`` are
    the first of ``waiting_count`` requests. ``limits`` has each limit that holds some of them, in words, with
    the command that changes it.
    """

    name: str
    usage: QueueUsage
    quota: Resources = {}
    limit: Resources = {}
    borrowed: Resources = {}
    lent: Resources = {}
    stopped: bool = False
    waiting: tuple[QueueWaiter, ...] = ()
    waiting_count: int = 0
    limits: tuple[str, ...] = ()
    summary: str = ""
    remedy: str = ""
