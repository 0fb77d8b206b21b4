"""Events, leadership, keys, tokens, logs and explanations; paging that all lists share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from stoker_wire.messages.cluster import Demand
from stoker_wire.messages.common import (
    ANY_NAMESPACE,
    Count,
    Int64,
    Message,
    PositiveSeconds,
    Record,
    Resources,
    Role,
    UnixUser,
)

T = TypeVar("T")

Position = Count
"""A place in a log: the sequence number of an event, or an offset in a file."""
WaitS = Annotated[float, msgspec.Meta(ge=0, le=60)]
"""For how long a reply may be held back until what it waits for is there."""


class Author(Record):
    """The person whose request made a change: by which token, from which address.

    With the cluster's secret the name is ``cluster``; who showed no valid token has none.
    """

    name: str
    role: str = ""
    token_id: str = ""
    address: str = ""


class Event(Record):
    """One entry of the append-only log. ``seq`` is the cursor of every watch.

    ``kind`` and the type of ``payload`` are those of :mod:`stoker_wire.messages.events`; ``subject``
    is the id of the entity, and ``payload`` its record after the change. ``by`` is null where no person's
    request made it: services and jobs do what they do for one, whom the record of the job names.
    """

    seq: int
    at_s: float
    kind: str
    subject: str
    payload: dict[str, Any] = {}
    by: Author | None = None


COUNTED = 10_000
"""``total`` counts no further than this."""


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One page of a list. ``next_cursor`` is empty at the end; ``seq`` is where to watch from.

    ``total`` is how many items match the filters, on all pages; null unless ``count`` asked for it
    and the list can tell. Counting stops at 10 000; ``total_exact`` is false if there are more, or if
    the number is rounded up (events of a cluster with several replicas).
    """

    items: tuple[T, ...]
    next_cursor: str = ""
    seq: int = 0
    total: int | None = None
    total_exact: bool = True


class Sort(StrEnum):
    """Sort key of a list."""

    ID = "id"
    CREATED = "created"
    """The order in which the cluster learned of the items."""


class Order(StrEnum):
    """The direction of a list."""

    ASC = "asc"
    DESC = "desc"


MAX_CURSOR = 2048


class ListQuery(Message):
    """Paging, shared by all lists. ``sort=created&order=desc`` gives the newest items first.

    A cursor stands behind the last item of its page and stays right while items come and go; it
    belongs to the ``sort`` and the ``order`` of that page. ``count`` asks for ``total``.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    cursor: Annotated[str, msgspec.Meta(max_length=MAX_CURSOR)] = ""
    sort: Sort = Sort.ID
    order: Order = Order.ASC
    count: bool = False


class LeaseQuery(ListQuery):
    """Leases of one job, owner or node; empty means any."""

    job_id: str = ""
    owner_id: str = ""
    node_id: str = ""


class IdQuery(Message):
    """The beginning of an id, and the most matches to show."""

    prefix: Annotated[str, msgspec.Meta(max_length=200)] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20


class IdMatch(Record):
    """An id that begins as asked: its ``kind`` (node, job, task, actor, worker), state and name."""

    id: str
    kind: str
    state: str = ""
    name: str = ""


class IdMatches(Record):
    """Ids that begin as asked, an exact match first; ``more``: there are others besides."""

    matches: tuple[IdMatch, ...]
    more: bool = False


class Campaign(Message):
    """Request of a process to lead, or to go on leading (with the ``epoch`` that it holds)."""

    holder: str
    url: str
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=300)] = 6.0
    epoch: Int64 = 0


class Leader(Record):
    """The current leader; ``epoch`` grows with each change and fences former leaders."""

    name: str
    holder: str
    url: str
    epoch: int
    expires_at_s: float


class PersonRole(StrEnum):
    """The roles of tokens that admins make: an admin may do all, a user own work, a viewer look on.

    With ``join`` a machine asks for the secret.
    """

    ADMIN = "admin"
    USER = "user"
    VIEWER = "viewer"
    JOIN = "join"


class CreateToken(Message):
    """Request for a token of a person; it is shown once, in the reply.

    ``namespaces`` are those that it may use (``*``: all); by default a user's is named like the user.
    A ``join`` token is for machines: it has an end, or is good ``once``, as no other is, and has neither
    ``namespaces`` nor ``run_as``: the Unix user (not root) as whom nodelets that are root run
    the jobs of a user or an admin.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.@-]+$")]
    role: PersonRole = PersonRole.USER
    namespaces: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=200)], ...],
        msgspec.Meta(max_length=64),
    ] = ()
    expires_in_s: PositiveSeconds | None = None
    once: bool = False
    run_as: UnixUser = ""


class Token(Record):
    """A token of a person (``secret``, by which it is used, is set only in the reply to its creation).

    ``signed_by`` names the cluster's secret with which it ends. One that is good ``once`` is revoked by
    its use.
    """

    token_id: str
    name: str
    created_at_s: float
    role: PersonRole = PersonRole.ADMIN
    namespaces: tuple[str, ...] = (ANY_NAMESPACE,)
    created_by: str = ""
    expires_at_s: float | None = None
    revoked: bool = False
    secret: str = ""
    signed_by: str = ""
    once: bool = False
    run_as: str = ""


class JoinReply(Record):
    """The cluster's secrets, for the token file of a machine that joins: the first signs."""

    secrets: tuple[str, ...]


SECRET_PATH = "/v1/secret"
"""The route of every service that answers with :class:`SecretStatus`."""


class SecretStatus(Record):
    """The cluster's secrets as a service has them, by names that give none away.

    ``behind`` are the processes, in words, that it has yet to give a token of the one that ``signs``.
    ``fixed`` is a secret that was given as text, and stays until the service is started again.
    """

    service: str
    signs: str
    accepts: tuple[str, ...]
    behind: tuple[str, ...] = ()
    fixed: bool = False


class Whoami(Record):
    """The sender of a request, as its token says: a person, a service, or a process of a job.

    ``name`` is that of a person or a service, and of a job that of its user. ``namespaces`` are those that
    it may use (``*``: all), and ``run_as`` the Unix user as whom root's nodelets run its jobs.
    """

    role: Role
    name: str = ""
    job_id: str = ""
    namespaces: tuple[str, ...] = ()
    token_id: str = ""
    expires_at_s: float | None = None
    run_as: str = ""


class ReviewChannel(Message):
    """Whether a process of another job, which shows ``proof``, may open a channel to ``peer_id``.

    ``peer_id`` is who asks; ``proof`` is that of :func:`stoker_wire.http.auth.channel_proof`. ``actor_id``
    is set for a detached actor.
    """

    job_id: str
    peer_id: str
    proof: str
    actor_id: str = ""


class ChannelReview(Record):
    """The answer to a ReviewChannel."""

    allowed: bool


class KvEntry(Record):
    """A key of the KV store. ``revision`` is the sequence number of the event of its last change."""

    namespace: str
    key: str
    nbytes: int
    revision: int
    expires_at_s: float | None = None


class KvItem(KvEntry):
    """A key with its value."""

    value: bytes = b""


MAX_KEY = 512
KvKey = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY, pattern=r"^[^\x00]*$")]
TtlS = Annotated[
    float,
    msgspec.Meta(
        gt=0,
        le=3_153_600_000,
        description="seconds after which the key is gone, unless it is put again",
    ),
]


class KvPut(Message, tag_field="op", tag="put"):
    """Set a key, if all conditions hold that are given; otherwise 409 with its ``revision`` in ``extra``.

    ``if_absent``: it does not exist; ``if_revision``: its last change was this one (0: it does not
    exist); ``if_value``: this is its value. Without ``ttl_s`` it stays until it is deleted. A key and its
    namespace have 2,000 bytes together.
    """

    key: KvKey
    value: bytes = b""
    if_absent: bool = False
    if_revision: Position | None = None
    if_value: bytes | None = None
    ttl_s: TtlS | None = None


class KvAdd(Message, tag_field="op", tag="add"):
    """Add ``amount`` to a whole number in ASCII decimals; a key that does not exist counts as 0.

    The key expires when it did, unless ``ttl_s`` is given. The reply has the sum as ``value``.
    """

    key: KvKey
    amount: Int64 = 1
    ttl_s: TtlS | None = None


class KvCompareSet(Message, tag_field="op", tag="compare_set"):
    """Set a key to ``desired`` if its value is ``expected``, or if that is empty and the key is absent.

    The reply has an ``entry`` if the key was set; if not, its value, or ``expected`` if it is absent.
    """

    key: KvKey
    desired: bytes
    expected: bytes = b""
    ttl_s: TtlS | None = None


class KvDelete(Message, tag_field="op", tag="delete"):
    """Delete a key; with ``if_revision`` only if its last change was this one (else 409)."""

    key: KvKey
    if_revision: Position | None = None


class KvDeletePrefix(Message, tag_field="op", tag="delete_prefix"):
    """Delete all keys that start with ``prefix``, in batches; the reply counts them.

    A key that is put meanwhile may stay. An empty ``prefix`` deletes every key of the namespace.
    """

    prefix: Annotated[str, msgspec.Meta(max_length=MAX_KEY)]


class KvGet(Message, tag_field="op", tag="get"):
    """Read several keys, once all of them exist, or after ``wait_s`` those that do."""

    keys: Annotated[tuple[KvKey, ...], msgspec.Meta(min_length=1, max_length=1000)]
    wait_s: WaitS = 0.0


KvOperation = KvPut | KvAdd | KvCompareSet | KvDelete | KvDeletePrefix | KvGet


class KvReply(Record):
    """The outcome of an operation on keys.

    ``entry``: the key that was set; ``value``: what it holds where the caller cannot know that;
    ``count``: how many keys were deleted; ``items``: the keys that were read.
    """

    entry: KvEntry | None = None
    value: bytes | None = None
    count: int = 0
    items: tuple[KvItem, ...] = ()


class LogStream(StrEnum):
    """Stream that a line was printed to."""

    STDOUT = "stdout"
    STDERR = "stderr"


class LogLine(Record):
    """One line of a worker's or driver's output. ``cursor`` is the byte offset behind it.

    ``at_s`` is when it was written, at the latest: the node looks at its files twice a second. A
    submitted driver's output is all ``stdout``. A line without a ``worker_id`` is no output: it says
    which output could not be had. ``cell`` is the notebook's cell whose call printed it, if one did.
    """

    node_id: str
    worker_id: str
    pid: int
    name: str
    text: str
    at_s: float = 0.0
    cursor: int = 0
    job_id: str = ""
    stream: LogStream = LogStream.STDOUT
    cell: str = ""


class LogCursors(Message):
    """Request for the workers' output after the last lines seen, up to now.

    ``cursors`` holds the cursor of the last line seen, by worker; of other workers everything is
    sent, or the last ``tail`` lines. A ``worker_id`` asks for one worker's.
    """

    cursors: dict[str, Position] = {}
    tail: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    worker_id: str = ""


class Fit(StrEnum):
    """Result of a node's judgement on a demand."""

    FITS = "fits"
    BUSY = "busy"
    """Would fit if leases there ended."""
    NEVER = "never"
    """Would not fit even if idle."""


class Verdict(Record):
    """Judgement of a node on a demand: one named rule, and the numbers behind it."""

    node_id: str
    fit: Fit
    rule: str = ""
    detail: str = ""
    remedy: str = ""
    score: float | None = None


class WaitingGroup(Record):
    """Actors or tasks of a job that wait for one and the same cause.

    ``kind`` is actor or task; ``example_id`` is one of them. ``count_exact`` is false if there may be
    more than were looked at.
    """

    kind: str
    name: str
    count: int
    cause: str
    example_id: str
    state: str = ""
    remedy: str = ""
    infeasible: bool = False
    count_exact: bool = True


class WaitPhase(StrEnum):
    """Phases on the way to a start."""

    DEPENDENCY = "dependency"
    """It waits for arguments, for another job, for its next attempt, its array, or its actor."""
    QUEUE = "queue"
    """It waits for resources, or for a limit of its queue."""
    ENVIRONMENT = "environment"
    """It has a node, which installs what its environment needs."""
    LEASE = "lease"
    """It has a node, where its worker starts."""


class ConstraintKind(StrEnum):
    """Kinds of constraint that keep a demand from starting."""

    INFEASIBLE = "infeasible"
    """No node could ever take it."""
    QUEUE_LIMIT = "queue_limit"
    CAPACITY = "capacity"
    """Others hold what it wants."""
    RESERVATION = "reservation"
    NODE = "node"
    """The nodes with room take nothing now."""
    PREEMPTION = "preemption"
    """Leases were asked back for it and have not ended yet."""
    PLACEMENT_GROUP = "placement_group"
    STARTING = "starting"


class Constraint(Record):
    """The binding constraint of a demand; ``queue`` and ``resource`` are what it is about, if they are."""

    kind: ConstraintKind
    text: str
    queue: str = ""
    resource: str = ""


class Remedy(Record):
    """The least that would let a demand start: tried on a copy of the scheduler's state before it is told.

    ``lease_ids`` are the leases that would have to end, ``node_id`` is where it then goes.
    """

    text: str
    node_id: str = ""
    lease_ids: tuple[str, ...] = ()


class Holder(Record):
    """A lease that holds what a demand wants.

    ``until_s`` is when it ends at the latest and ``until`` why, as far as that is known: its job has a
    timeout, or it is ending or asked back.
    """

    lease_id: str
    kind: str
    job_id: str
    node_id: str
    resources: Resources = {}
    gpus: dict[int, float] = {}
    name: str = ""
    actor_id: str = ""
    group_id: str = ""
    queue: str = ""
    user: str = ""
    priority: int = 0
    since_s: float = 0.0
    until_s: float | None = None
    until: str = ""


class Explanation(Record):
    """Reason why something waits (or its outcome), and what would have to change.

    ``cause`` says in a few words what the nodes lack, while something waits for them. ``waiting`` is,
    for a job, what of it waits, by cause. ``constraint`` is what binds; ``remedies`` are the least that may
    happen, or can be done, for it to start; ``holders`` have what it wants, those first whose end would do.
    """

    subject: str
    state: str
    summary: str
    remedy: str = ""
    waited_s: float = 0.0
    queue_position: int | None = None
    verdicts: tuple[Verdict, ...] = ()
    events: tuple[Event, ...] = ()
    demand: Demand | None = None
    cause: str = ""
    waiting: tuple[WaitingGroup, ...] = ()
    phase: WaitPhase | None = None
    constraint: Constraint | None = None
    remedies: tuple[Remedy, ...] = ()
    holders: tuple[Holder, ...] = ()


class ExplainQuery(Message):
    """``remedies``: look for what would let it start, and who holds what it wants."""

    remedies: bool = False


class QueueEntry(Record):
    """A ``demand`` that waits in the scheduler, or all bundles of ``group_id`` (``resources``: the sum)."""

    request_id: str
    owner_id: str
    job_id: str
    name: str
    resources: Resources
    count: int
    waiting_s: float
    position: int
    infeasible: bool = False
    demand: Demand | None = None
    group_id: str = ""


class Kept(Record):
    """Count of what is kept of one kind; of jobs, actors, placement groups and nodes those that have ended.

    ``keep`` is how many are kept at most, ``keep_s`` for how long after their end; 0 means all, for ever.
    ``removed`` is how many have left by retention.
    """

    kind: str
    count: int
    oldest_at_s: float | None = None
    keep: int = 0
    keep_s: float = 0.0
    removed: int = 0


class RetentionStatus(Record):
    """All kinds, and the log files, and unpacked packages and venvs, of the living nodes."""

    kinds: tuple[Kept, ...]
    log_files: int = 0
    log_bytes: int = 0
    environments: int = 0
    environment_bytes: int = 0
