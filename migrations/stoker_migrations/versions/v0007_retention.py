"""Retention: the index by which open tasks are found, the ids of deleted jobs, and the last uses of blobs."""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

INDEX = "ix_tasks_state_job_id"


def upgrade() -> None:
    """Make the index and the tables; deleted jobs are those that the event log still knows."""
    postgresql = op.get_bind().dialect.name == "postgresql"
    text = sa.Text(collation="C") if postgresql else sa.Text()
    op.create_index(INDEX, "tasks", ["state", "job_id"])
    op.create_table("deleted_jobs", sa.Column("job_id", text, primary_key=True))
    op.create_table(
        "blob_uses",
        sa.Column("kind", text, primary_key=True),
        sa.Column("blob_id", text, primary_key=True),
        sa.Column("used_at_s", sa.Float(), nullable=False),
    )
    op.execute(
        "INSERT INTO deleted_jobs (job_id) SELECT DISTINCT subject FROM events "
        "WHERE kind = 'job.deleted'"
    )
    # When they were used is not known, so that their time begins now.
    uses = "INSERT INTO blob_uses (kind, blob_id, used_at_s) SELECT kind, blob_id, :now FROM blobs"
    op.get_bind().execute(sa.text(uses), {"now": time.time()})


def downgrade() -> None:
    """Drop them."""
    op.drop_table("blob_uses")
    op.drop_table("deleted_jobs")
    op.drop_index(INDEX, table_name="tasks")
