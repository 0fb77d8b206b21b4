"""Sums for the dashboard: counts of tasks by function, times of attempts as columns, samples of use."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_TIMES = ("submitted_at_s", "started_at_s", "ended_at_s")
_FACTS = ("parent_task_id", *_TIMES, "worker_id", "args_nbytes", "result_nbytes", "error")
"""The first facts of an attempt, in the order in which they are packed."""
_ENDED_RANK = 3
_BATCH = 5000
_MAX_NAMES = 1000
_TASKS = sa.table(
    "tasks",
    *(
        sa.column(name)
        for name in ("task_id", "attempt", "job_id", "state", "name", "rank", "record")
    ),
    *(sa.column(name) for name in (*_TIMES, "worker_id")),
)


def upgrade() -> None:
    """Make the columns and the tables, and fill them from the records."""
    for name in _TIMES:
        op.add_column("tasks", sa.Column(name, sa.Float(), nullable=True))
    op.add_column("tasks", sa.Column("worker_id", sa.Text(), nullable=True))
    op.create_index("ix_tasks_job_id_started_at_s", "tasks", ["job_id", "started_at_s"])
    # Of a job alone, so that its rows come in the order of their arrival; state and job have their own.
    op.create_index("ix_tasks_job_id", "tasks", ["job_id"])
    op.drop_index("ix_tasks_job_id_state", "tasks")
    key = sa.Text(collation="C") if op.get_bind().dialect.name == "postgresql" else sa.Text()
    counts = op.create_table(
        "task_counts",
        *(sa.Column(name, key, primary_key=True) for name in ("job_id", "name", "state", "code")),
        sa.Column("count", sa.BigInteger(), nullable=False),
    )
    durations = op.create_table(
        "task_durations",
        *(sa.Column(name, key, primary_key=True) for name in ("job_id", "name", "measure")),
        sa.Column("bucket", sa.BigInteger(), primary_key=True),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("total_s", sa.Float(), nullable=False),
    )
    op.create_table(
        "usage",
        sa.Column("step_s", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("at_s", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
    )
    _fill(op.get_bind(), counts, durations)


def _fill(connection: sa.Connection, counts: sa.Table, durations: sa.Table) -> None:
    number: defaultdict[tuple[Any, ...], int] = defaultdict(int)
    times: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0, 0.0])
    names: defaultdict[str, set[str]] = defaultdict(set)
    change = (
        _TASKS.update()
        .where(_TASKS.c.task_id == sa.bindparam("id"), _TASKS.c.attempt == sa.bindparam("number"))
        .values({name: sa.bindparam(f"new_{name}") for name in (*_TIMES, "worker_id")})
    )
    after = ("", -1)
    key = sa.tuple_(_TASKS.c.task_id, _TASKS.c.attempt)
    query = (
        sa.select(*list(_TASKS.c)[:7]).order_by(_TASKS.c.task_id, _TASKS.c.attempt).limit(_BATCH)
    )
    while rows := connection.execute(query.where(key > sa.tuple_(*after))).all():
        after = (rows[-1].task_id, rows[-1].attempt)
        changes = []
        for row in rows:
            facts = _facts(row.record)
            changes.append(
                {"id": row.task_id, "number": row.attempt}
                | {f"new_{name}": facts.get(name) for name in (*_TIMES, "worker_id")}
            )
            known = names[row.job_id]
            if row.name not in known and len(known) < _MAX_NAMES:
                known.add(row.name)
            name = row.name if row.name in known else "(others)"
            error = facts.get("error") if row.state in ("FAILED", "CANCELLED") else None
            number[row.job_id, name, row.state, _code(error)] += 1
            submitted, started, ended = (facts.get(one) for one in _TIMES)
            if row.rank < _ENDED_RANK or started is None:
                continue
            for measure, first, last in (("wait", submitted, started), ("run", started, ended)):
                if first is not None and last is not None:
                    seconds = max(0.0, last - first)
                    cell = times[row.job_id, name, measure, _bucket(seconds)]
                    cell[0] += 1
                    cell[1] += seconds
        connection.execute(change, changes)
    columns = ("job_id", "name", "state", "code", "count")
    if number:
        connection.execute(
            counts.insert(), [dict(zip(columns, (*k, n), strict=True)) for k, n in number.items()]
        )
    of_times = ("job_id", "name", "measure", "bucket", "count", "total_s")
    if times:
        connection.execute(
            durations.insert(),
            [dict(zip(of_times, (*k, int(n), s), strict=True)) for k, (n, s) in times.items()],
        )


def _facts(packed: bytes) -> dict[str, Any]:
    try:
        facts = msgspec.msgpack.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}  # a damaged record
    return facts if isinstance(facts, dict) else dict(zip(_FACTS, facts, strict=False))


def _code(error: Any) -> str:
    return str(error.get("code", "")) if isinstance(error, dict) else ""


def _bucket(seconds: float) -> int:
    return math.ceil(4 * math.log2(seconds / 1e-6)) if seconds > 1e-6 else 0


def downgrade() -> None:
    """Drop them."""
    op.drop_table("usage")
    op.drop_table("task_durations")
    op.drop_table("task_counts")
    op.create_index("ix_tasks_job_id_state", "tasks", ["job_id", "state"])
    op.drop_index("ix_tasks_job_id", "tasks")
    op.drop_index("ix_tasks_job_id_started_at_s", "tasks")
    with op.batch_alter_table("tasks") as tasks:
        for name in (*_TIMES, "worker_id"):
            tasks.drop_column(name)
