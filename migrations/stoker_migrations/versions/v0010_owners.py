"""The owners of jobs: whose jobs a user sees."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_JOBS = sa.table(
    "jobs", sa.column("job_id", sa.Text), sa.column("owner", sa.Text), sa.column("record")
)


def upgrade() -> None:
    """Add the column, and fill it from the records."""
    op.add_column("jobs", sa.Column("owner", sa.Text(), nullable=True))
    connection = op.get_bind()
    owners = [
        {"id": job_id, "name": _user_of(record)}
        for job_id, record in connection.execute(sa.select(_JOBS.c.job_id, _JOBS.c.record))
    ]
    if owners:
        change = _JOBS.update().where(_JOBS.c.job_id == sa.bindparam("id"))
        connection.execute(change.values(owner=sa.bindparam("name")), owners)
    op.create_index("ix_jobs_owner", "jobs", ["owner"])


def _user_of(record: bytes) -> str:
    try:
        return str(msgspec.msgpack.decode(record).get("user", ""))
    except msgspec.DecodeError:
        return ""  # a damaged record is nobody's


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_jobs_owner", "jobs")
    op.drop_column("jobs", "owner")
