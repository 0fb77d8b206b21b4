"""The schema as plain data: one description of the tables for SQLite, PostgreSQL, memory and Alembic.

The stores read it on every start, so it imports nothing heavy: a fresh SQLite file is made from it in
milliseconds, without SQLAlchemy or Alembic. ``tables.py`` turns it into SQLAlchemy metadata for the
migrations, and a contract test proves that migrating and creating give the same schema.

A state table holds the msgpack of the wire record in ``record`` and, beside it, only the columns that
a WHERE needs (in ``tasks``, what its first columns do not say: :class:`stoker_wire.data.spool.TaskFacts`).
Texts that are searched by their beginning (the keys, the subjects of events) compare as bytes, as
everywhere in SQLite; PostgreSQL gets ``COLLATE "C"``, so that its index serves the search.
``version`` counts the changes of a row: writers compare and swap on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

REVISION = "0012"
"""The Alembic revision that this description equals. A change here needs a migration and a new one."""


class Type(StrEnum):
    """Column types that all stores have."""

    TEXT = "TEXT"
    INT = "BIGINT"
    FLOAT = "FLOAT"
    BYTES = "BYTES"


@dataclass(frozen=True, slots=True)
class Column:
    """One column. ``null`` permits NULL."""

    name: str
    type: Type = Type.TEXT
    null: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its primary key, its indexes (tuples of columns) and its unique indexes.

    ``searched`` names text columns beside the key that are searched by their beginning. The rows of
    a ``listed`` table are numbered in the order in which they came: SQLite does so by itself in
    ``rowid``, PostgreSQL in a column of that name; a change of a row keeps its number. A ``clustered``
    one has none in SQLite: its rows lie in the order of their key, which ranges of it are read by.
    """

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    indexes: tuple[tuple[str, ...], ...] = ()
    unique: tuple[tuple[str, ...], ...] = ()
    counted: bool = False
    listed: bool = False
    clustered: bool = False
    searched: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all columns, in order."""
        return tuple(column.name for column in self.columns)


def _int(name: str, *, null: bool = False) -> Column:
    return Column(name, Type.INT, null)


def _float(name: str, *, null: bool = False) -> Column:
    return Column(name, Type.FLOAT, null)


def _bytes(name: str, *, null: bool = False) -> Column:
    return Column(name, Type.BYTES, null)


_VERSION = _int("version")
_RECORD = _bytes("record")
_TEXT = Column

EVENTS = Table(
    "events",
    (_int("seq"), _float("at_s"), _TEXT("kind"), _TEXT("subject"), _bytes("payload")),
    key=("seq",),
    indexes=(("subject",),),
    counted=True,
    searched=("subject",),
)
SNAPSHOTS = Table(
    "snapshots",
    (_int("seq"), _int("part"), _float("at_s"), _bytes("value")),
    key=("seq", "part"),
)
"""The state after some events, in parts; part 0, which is written last, says how many."""
META = Table("meta", (_TEXT("name"), _TEXT("value")), key=("name",))
NODES = Table(
    "nodes",
    (
        _TEXT("node_id"),
        _TEXT("state"),
        _int("incarnation"),
        _float("heartbeat_at_s"),
        _VERSION,
        _RECORD,
    ),
    key=("node_id",),
    listed=True,
)
JOBS = Table(
    "jobs",
    (
        _TEXT("job_id"),
        _TEXT("state"),
        _TEXT("namespace"),
        _TEXT("node_id"),
        _VERSION,
        _RECORD,
        Column("owner", null=True),
    ),
    key=("job_id",),
    indexes=(("state",), ("owner",)),
    listed=True,
)
DELETED_JOBS = Table("deleted_jobs", (_TEXT("job_id"),), key=("job_id",))
"""The ids of jobs that are gone, which no other job gets."""
ACTORS = Table(
    "actors",
    (
        _TEXT("actor_id"),
        _TEXT("job_id"),
        _TEXT("state"),
        _TEXT("node_id"),
        _TEXT("namespace"),
        _TEXT("name"),
        _TEXT("class_name"),
        Column("live_name", null=True),
        _int("incarnation"),
        _VERSION,
        _RECORD,
        _bytes("spec"),
    ),
    key=("actor_id",),
    indexes=(("job_id",), ("state",), ("node_id",)),
    unique=(("live_name",),),
    listed=True,
)
PLACEMENT_GROUPS = Table(
    "placement_groups",
    (
        _TEXT("group_id"),
        _TEXT("job_id"),
        _TEXT("state"),
        _TEXT("namespace"),
        _TEXT("name"),
        Column("live_name", null=True),
        _VERSION,
        _RECORD,
    ),
    key=("group_id",),
    indexes=(("job_id",), ("state",)),
    unique=(("live_name",),),
    listed=True,
)
DETACHED_OBJECTS = Table(
    "detached_objects",
    (
        _TEXT("object_id"),
        _TEXT("job_id"),
        _TEXT("state"),
        _TEXT("namespace"),
        _TEXT("name"),
        Column("live_name", null=True),
        _VERSION,
        _RECORD,
        _bytes("value", null=True),
    ),
    key=("object_id",),
    indexes=(("namespace",),),
    unique=(("live_name",),),
    listed=True,
)
QUEUES = Table("queues", (_TEXT("name"), _TEXT("parent"), _VERSION, _RECORD), key=("name",))
SCHEDULES = Table("schedules", (_TEXT("name"), _VERSION, _RECORD), key=("name",))
LEASES = Table(
    "leases",
    (_TEXT("lease_id"), _TEXT("job_id"), _TEXT("node_id"), _TEXT("state"), _VERSION, _RECORD),
    key=("lease_id",),
    indexes=(("job_id",), ("node_id",)),
)
TASKS = Table(
    "tasks",
    (
        _TEXT("task_id"),
        _int("attempt"),
        _TEXT("job_id"),
        _TEXT("state"),
        _TEXT("name"),
        _TEXT("node_id"),
        _TEXT("actor_id"),
        _int("rank"),
        _RECORD,
        _float("submitted_at_s", null=True),
        _float("started_at_s", null=True),
        _float("ended_at_s", null=True),
        Column("worker_id", null=True),
    ),
    key=("task_id", "attempt"),
    indexes=(("job_id",), ("state", "job_id"), ("job_id", "started_at_s")),
    listed=True,
)
TASK_COUNTS = Table(
    "task_counts",
    (_TEXT("job_id"), _TEXT("name"), _TEXT("state"), _TEXT("code"), _int("count")),
    key=("job_id", "name", "state", "code"),
)
"""How many attempts of each function of a job are in each state, and with which error: of those that
retention has removed as well. Written with the attempts (:mod:`stoker_gcs.store.task_counts`)."""
TASK_DURATIONS = Table(
    "task_durations",
    (
        _TEXT("job_id"),
        _TEXT("name"),
        _TEXT("measure"),
        _int("bucket"),
        _int("count"),
        _float("total_s"),
    ),
    key=("job_id", "name", "measure", "bucket"),
)
"""How long the attempts of each function of a job ran and waited, as a histogram."""
USAGE = Table(
    "usage",
    (_int("step_s"), _int("at_s"), _bytes("value")),
    key=("step_s", "at_s"),
)
"""How the cluster was used: a sample for each step of time, of several lengths
(:mod:`stoker_gcs.controllers.usage`)."""
TRAINING_RUNS = Table(
    "training_runs",
    (_TEXT("job_id"), _TEXT("run"), _float("first_at_s")),
    key=("job_id", "run"),
    listed=True,
)
TRAINING_METRICS = Table(
    "training_metrics",
    (
        _TEXT("job_id"),
        _TEXT("run"),
        _TEXT("metric"),
        _int("series"),
        _int("count"),
        _int("first_step"),
        _int("last_step"),
        _int("newest_step"),
        _float("first_at_s"),
        _float("newest_at_s"),
        _float("newest_value", null=True),
    ),
    key=("job_id", "run", "metric"),
)
"""The metrics of each run, and the newest value of each: NULL for one that is not a number."""
TRAINING_VALUES = Table(
    "training_values",
    (
        _int("series"),
        _int("width"),
        _int("step"),
        _int("count"),
        _float("total"),
        _float("low", null=True),
        _float("high", null=True),
        _int("nans"),
        _float("at_s"),
    ),
    key=("series", "width", "step"),
    clustered=True,
)
"""The values of metrics by step (``width`` 1), and added up over wider ranges of steps
(:mod:`stoker_gcs.store.training`)."""
KV = Table(
    "kv",
    (
        _TEXT("namespace"),
        _TEXT("key"),
        _int("nbytes"),
        _int("revision"),
        _bytes("value"),
        _float("expires_at_s", null=True),
    ),
    key=("namespace", "key"),
    indexes=(("expires_at_s",),),
)
KV_REQUESTS = Table(
    "kv_requests",
    (
        _TEXT("request"),
        _bytes("fingerprint"),
        _int("revision"),
        _bytes("reply"),
        _float("expires_at_s"),
    ),
    key=("request",),
    indexes=(("expires_at_s",),),
)
BLOBS = Table(
    "blobs",
    (_TEXT("kind"), _TEXT("blob_id"), _int("nbytes"), _float("created_at_s"), _bytes("value")),
    key=("kind", "blob_id"),
)
BLOB_USES = Table(
    "blob_uses",
    (_TEXT("kind"), _TEXT("blob_id"), _float("used_at_s")),
    key=("kind", "blob_id"),
)
"""When each blob was last put, asked for or got: beside the blobs, whose rows are large."""
TOKENS = Table(
    "tokens",
    (
        _TEXT("token_id"),
        _TEXT("secret_hash"),
        _float("expires_at_s", null=True),
        _int("revoked"),
        _VERSION,
        _RECORD,
    ),
    key=("token_id",),
    unique=(("secret_hash",),),
)
LEADERS = Table(
    "leaders",
    (_TEXT("name"), _TEXT("holder"), _TEXT("url"), _int("epoch"), _float("expires_at_s")),
    key=("name",),
)
SCHEDULER = "scheduler"
"""The name that the leading scheduler leads."""
RESIGNED = 0.0
"""The expiry of a leader that resigned."""
FACTS = Table(
    "facts",
    (_TEXT("kind"), _TEXT("key"), _bytes("value"), _float("expires_at_s")),
    key=("kind", "key"),
)
TABLES: tuple[Table, ...] = (
    EVENTS,
    SNAPSHOTS,
    META,
    NODES,
    JOBS,
    DELETED_JOBS,
    ACTORS,
    PLACEMENT_GROUPS,
    DETACHED_OBJECTS,
    QUEUES,
    SCHEDULES,
    LEASES,
    TASKS,
    TASK_COUNTS,
    TASK_DURATIONS,
    USAGE,
    TRAINING_RUNS,
    TRAINING_METRICS,
    TRAINING_VALUES,
    KV,
    KV_REQUESTS,
    BLOBS,
    BLOB_USES,
    TOKENS,
    LEADERS,
    FACTS,
)
ARRIVAL = "rowid"
"""The number of a row of a listed table: it grows with every row that is added."""

_SQLITE_TYPES = {Type.TEXT: "TEXT", Type.INT: "BIGINT", Type.FLOAT: "FLOAT", Type.BYTES: "BLOB"}


def index_name(table: Table, columns: tuple[str, ...], *, unique: bool) -> str:
    """Return the name of an index: ``ix_jobs_state``, ``ux_actors_live_name``."""
    return f"{'ux' if unique else 'ix'}_{table.name}_{'_'.join(columns)}"


def sqlite_ddl() -> list[str]:
    """Return the statements that make an empty SQLite file a database of :data:`REVISION`."""
    statements = []
    for table in TABLES:
        lines = []
        for column in table.columns:
            kind = (
                "INTEGER"
                if table.counted and (column.name,) == table.key
                else _SQLITE_TYPES[column.type]
            )
            lines.append(f"{column.name} {kind}{'' if column.null else ' NOT NULL'}")
        if table.counted:
            lines[0] += " PRIMARY KEY AUTOINCREMENT"
        else:
            lines.append(f"PRIMARY KEY ({', '.join(table.key)})")
        kind = " WITHOUT ROWID" if table.clustered else ""
        statements.append(f"CREATE TABLE {table.name} ({', '.join(lines)}){kind}")
        for columns, unique in [(c, False) for c in table.indexes] + [
            (c, True) for c in table.unique
        ]:
            statements.append(
                f"CREATE {'UNIQUE ' if unique else ''}INDEX {index_name(table, columns, unique=unique)} "
                f"ON {table.name} ({', '.join(columns)})"
            )
    statements.append(
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
        "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
    )
    statements.append(f"INSERT INTO alembic_version VALUES ('{REVISION}')")
    return statements
